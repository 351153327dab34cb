# ruff: noqa: E501
"""Which test shows what each route and each field does; docs/api.md is made from it, test_api.py checks it.

What a body accepts without effect, and what is refused by name, is not here: test_api.py tests all of it.
"""

from __future__ import annotations

ROUTES = {
    "GET /v1/models": "test_misc.py::test_models",
    "GET /v1/models/{model}": "test_misc.py::test_models",
    "POST /v1/chat/completions": "openai/test_chat.py::test_whole_response",
    "POST /v1/chat/completions/render": "openai/test_fields.py::test_render",
    "POST /v1/completions": "openai/test_completions.py::test_prompt_shapes",
    "POST /v1/tokenize": "test_misc.py::test_tokenize",
    "POST /v1/detokenize": "test_misc.py::test_detokenize",
    "GET /v1/tokenizer_info": "test_misc.py::test_tokenizer_info",
    "POST /v1/responses": "responses/test_responses.py::TestCreate::test_answers_with_a_response_that_the_sdk_knows",
    "POST /v1/responses/input_tokens": "responses/test_responses.py::test_input_tokens",
    "GET /v1/responses/{response_id}": "responses/test_responses.py::TestBackground::test_its_stream_can_be_followed_again",
    "DELETE /v1/responses/{response_id}": "responses/test_responses.py::TestBackground::test_delete_stops_it",
    "POST /v1/responses/{response_id}/cancel": "responses/test_responses.py::TestBackground::test_cancel_frees_the_engine",
    "GET /v1/responses/{response_id}/input_items": "responses/test_responses.py::TestChain::test_input_items_in_pages",
    "POST /v1/conversations": "responses/test_conversations.py::test_a_conversation_lives_and_ends",
    "GET /v1/conversations/{conversation_id}": "responses/test_conversations.py::test_a_conversation_lives_and_ends",
    "POST /v1/conversations/{conversation_id}": "responses/test_conversations.py::test_a_conversation_lives_and_ends",
    "DELETE /v1/conversations/{conversation_id}": "responses/test_conversations.py::test_a_conversation_lives_and_ends",
    "POST /v1/conversations/{conversation_id}/items": "responses/test_conversations.py::test_items_of_every_kind",
    "GET /v1/conversations/{conversation_id}/items": "responses/test_conversations.py::test_items_of_every_kind",
    "GET /v1/conversations/{conversation_id}/items/{item_id}": "responses/test_conversations.py::test_items_of_every_kind",
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": "responses/test_conversations.py::test_items_of_every_kind",
    "POST /v1/messages": "anthropic/test_anthropic.py::test_create",
    "POST /v1/messages/count_tokens": "anthropic/test_anthropic.py::test_count_tokens_is_exact",
    "POST /v1/embeddings": "pooling/test_embeddings.py::test_every_shape_of_input",
    "POST /v1/score": "pooling/test_scoring.py::test_cosine_of_one_text_and_many",
    "POST /v1/rerank": "pooling/test_scoring.py::test_jina_ranks_best_first",
    "POST /v2/rerank": "pooling/test_scoring.py::test_cohere_shapes",
    "POST /v1/classify": "pooling/test_scoring.py::test_classify",
    "POST /v1/files": "batches/test_files.py::test_a_file_comes_back_as_it_was",
    "GET /v1/files": "batches/test_files.py::test_lists_by_purpose_order_and_page",
    "GET /v1/files/{file_id}": "batches/test_files.py::test_a_file_comes_back_as_it_was",
    "DELETE /v1/files/{file_id}": "batches/test_files.py::test_a_file_comes_back_as_it_was",
    "GET /v1/files/{file_id}/content": "batches/test_files.py::test_a_file_comes_back_as_it_was",
    "POST /v1/batches": "batches/test_batches.py::test_hundred_chats",
    "GET /v1/batches": "batches/test_batches.py::test_pages_and_unknown_ids",
    "GET /v1/batches/{batch_id}": "batches/test_batches.py::test_hundred_chats",
    "POST /v1/batches/{batch_id}/cancel": "batches/test_batches.py::test_cancel_stops_running_lines",
    "GET /health": "test_misc.py::test_probes",
    "GET /ready": "test_misc.py::test_probes",
    "GET /version": "test_misc.py::test_probes",
    "GET /load": "test_misc.py::test_load_counts_running_requests",
    "GET /metrics": "test_misc.py::test_metrics",
}

FIELDS: dict[str, dict[str, str]] = {
    "ChatRequest": {
        "openai/test_chat.py::test_rendering": "messages",
        "openai/test_chat.py::test_top_logprobs_are_the_best_whether_or_not_chosen": "logprobs top_logprobs",
        "openai/test_chat.py::test_max_tokens_is_the_rest_of_the_context_by_default": "max_tokens "
        "max_completion_tokens",
        "openai/test_chat.py::test_add_special_tokens": "add_special_tokens",
        "openai/test_fields.py::TestEchoOfAChat::test_not_of_another_role": "echo",
        "openai/test_tools.py::test_include_reasoning_false_leaves_it_out": "include_reasoning",
        "http/test_errors.py::test_chat_refusals": "modalities prompt_cache_retention",
    },
    "GenerationRequest": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "openai/test_fields.py::test_sampling_fields_reach_the_engine": "repeat_last_n allowed_token_ids bad_words",
        "openai/test_chat.py::test_n_choices_interleave_and_each_is_whole": "n",
        "openai/test_fields.py::test_best_of_returns_the_likeliest_and_counts_all": "best_of",
        "openai/test_completions.py::test_stream_equals_the_whole": "stream",
        "openai/test_chat.py::test_stream_is_role_then_content_then_finish_then_usage": "stream_options",
        "openai/test_fields.py::TestBeamSearch::test_finds_what_greedy_does_not": "use_beam_search",
        "openai/test_fields.py::TestBeamSearch::test_length_penalty_and_eos": "length_penalty",
        "test_other_fields.py::test_early_stopping_reaches_the_search": "early_stopping",
        "openai/test_chat.py::test_prompt_logprobs": "prompt_logprobs",
        "openai/test_fields.py::test_token_ids_come_back": "return_token_ids",
        "openai/test_fields.py::test_tokens_named_by_their_ids": "return_tokens_as_token_ids",
        "openai/test_chat.py::test_rendering": "truncate_prompt_tokens",
        "openai/test_chat.py::test_engine_extras_reach_the_engine": "request_id",
        "openai/test_fields.py::test_labels_come_back": "conversation_id resource_id",
    },
    "StructuredFields": {
        "openai/test_fields.py::test_constraints_reach_the_engine": "response_format "
        "structured_outputs guided_json "
        "guided_regex guided_choice "
        "guided_grammar"
    },
    "JSONSchemaFormat": {"openai/test_fields.py::test_constraints_reach_the_engine": "json_schema"},
    "JSONSchema": {
        "openai/test_fields.py::test_constraints_reach_the_engine": "schema",
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "name description strict",
    },
    "StructuralTagFormat": {"openai/test_fields.py::test_constraints_reach_the_engine": "structures triggers"},
    "Structure": {"openai/test_fields.py::test_constraints_reach_the_engine": "begin schema end"},
    "StructuredOutputsFields": {
        "openai/test_fields.py::test_constraints_reach_the_engine": "json json_object regex "
        "choice grammar "
        "structural_tag"
    },
    "StreamOptions": {
        "openai/test_chat.py::test_stream_is_role_then_content_then_finish_then_usage": "include_usage",
        "openai/test_chat.py::test_continuous_usage_grows_to_the_total": "continuous_usage_stats",
    },
    "TemplateFields": {
        "openai/test_chat.py::test_rendering": "add_generation_prompt continue_final_message "
        "chat_template chat_template_kwargs documents",
        "openai/test_tools.py::test_thinking_reaches_the_template_and_the_grammar": "reasoning_effort thinking",
    },
    "Thinking": {"openai/test_tools.py::test_thinking_reaches_the_template_and_the_grammar": "type"},
    "ToolFields": {
        "openai/test_tools.py::test_a_whole_call": "tools",
        "openai/test_tools.py::test_calls_are_enforced": "tool_choice",
        "openai/test_tools.py::test_one_call_where_parallel_calls_are_off": "parallel_tool_calls",
    },
    "FunctionDefinition": {
        "test_other_fields.py::TestResponses::test_tools_reach_the_template": "name description parameters",
        "openai/test_tools.py::test_auto_is_constrained_where_a_tool_is_strict": "strict",
    },
    "NamedToolChoice": {"openai/test_tools.py::test_calls_are_enforced": "function"},
    "FunctionName": {"openai/test_tools.py::test_calls_are_enforced": "name"},
    "AllowedToolsChoice": {"openai/test_tools.py::test_allowed_tools_are_the_only_ones": "allowed_tools"},
    "AllowedTools": {"openai/test_tools.py::test_allowed_tools_are_the_only_ones": "mode tools"},
    "Message": {
        "test_other_fields.py::TestMessages::test_what_a_template_sees": "role content name refusal "
        "reasoning_content reasoning",
        "openai/test_tools.py::test_history_reaches_the_template": "tool_calls tool_call_id",
    },
    "TextPart": {"test_other_fields.py::TestMessages::test_what_a_template_sees": "text"},
    "RefusalPart": {"test_other_fields.py::TestMessages::test_what_a_template_sees": "refusal"},
    "HistoryToolCall": {
        "openai/test_tools.py::test_history_reaches_the_template": "id function",
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "index",
    },
    "FunctionCall": {"openai/test_tools.py::test_history_reaches_the_template": "name arguments"},
    "CompletionRequest": {
        "openai/test_completions.py::test_prompt_shapes": "prompt",
        "openai/test_completions.py::test_echo_pairs_each_choice_with_its_prompt": "echo",
        "openai/test_completions.py::test_logprobs_two": "logprobs",
        "openai/test_completions.py::test_default_max_tokens_shrinks_to_the_context": "max_tokens",
        "test_other_fields.py::test_completions_add_special_tokens": "add_special_tokens",
    },
    "TokenizeRequest": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "test_misc.py::test_tokenize": "prompt content messages add_special_tokens add_special",
        "test_misc.py::test_tokenize_strings": "return_token_strs",
    },
    "DetokenizeRequest": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "test_misc.py::test_detokenize": "tokens",
    },
    "ResponseRequest": {
        "responses/test_responses.py::TestBackground::test_runs_until_it_is_polled_as_completed": "background",
        "responses/test_responses.py::TestCreate::test_log_probabilities_when_included": "include top_logprobs",
        "responses/test_responses.py::TestCreate::test_length_is_incomplete": "max_output_tokens",
        "responses/test_responses.py::TestChain::test_what_is_not_stored_cannot_be_continued": "store",
        "responses/test_responses.py::TestStream::test_the_sdk_helper_finishes": "stream",
        "test_other_fields.py::TestResponses::test_nothing_is_padded": "stream_options",
    },
    "ResponseStreamOptions": {"test_other_fields.py::TestResponses::test_nothing_is_padded": "include_obfuscation"},
    "PromptFields": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "responses/test_responses.py::TestCreate::test_items_become_the_messages_of_a_chat": "input",
        "responses/test_responses.py::TestChain::test_continues_what_was_said_without_its_instructions": "instructions "
        "previous_response_id",
        "responses/test_conversations.py::test_responses_continue_it_and_add_to_it": "conversation",
        "responses/test_responses.py::TestTools::test_a_call_and_its_output": "tools",
        "responses/test_responses.py::TestTools::test_choices_are_shown_as_they_were_sent": "tool_choice "
        "parallel_tool_calls",
        "responses/test_responses.py::TestCreate::test_json_object": "text",
        "responses/test_responses.py::TestReasoning::test_effort_reaches_the_template": "reasoning",
        "responses/test_responses.py::TestChain::test_truncation_auto_drops_the_oldest_turns": "truncation",
        "test_other_fields.py::TestResponses::test_chat_template_kwargs": "chat_template_kwargs",
    },
    "ConversationParam": {"responses/test_conversations.py::test_an_item_added_twice_gets_an_id_of_its_own": "id"},
    "MetadataFields": {
        "responses/test_responses.py::TestCreate::test_answers_with_a_response_that_the_sdk_knows": "metadata"
    },
    "ChosenFunction": {"responses/test_responses.py::TestTools::test_choices_are_shown_as_they_were_sent": "name"},
    "AllowedFunctions": {
        "responses/test_responses.py::TestTools::test_choices_are_shown_as_they_were_sent": "mode tools"
    },
    "TextConfig": {
        "responses/test_responses.py::TestCreate::test_json_object": "format",
        "test_other_fields.py::TestResponses::test_verbosity_has_its_default_only": "verbosity",
    },
    "TextSchemaFormat": {
        "test_other_fields.py::TestResponses::test_text_follows_a_schema": "schema",
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "name description strict",
    },
    "ReasoningConfig": {
        "responses/test_responses.py::TestReasoning::test_effort_reaches_the_template": "effort",
        "responses/test_responses.py::TestReasoning::test_as_a_summary": "summary",
        "test_other_fields.py::TestResponses::test_generate_summary_is_summary": "generate_summary",
    },
    "InputItem": {"test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "id"},
    "MessageItem": {
        "responses/test_responses.py::TestCreate::test_items_become_the_messages_of_a_chat": "role content",
        "test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "status",
    },
    "InputText": {"responses/test_responses.py::TestCreate::test_items_become_the_messages_of_a_chat": "text"},
    "OutputTextPart": {
        "test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "text annotations logprobs"
    },
    "RefusalContent": {"test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "refusal"},
    "FunctionCallItem": {"test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "call_id status"},
    "FunctionCallOutputItem": {
        "responses/test_responses.py::TestTools::test_a_call_and_its_output": "call_id output",
        "test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "status",
    },
    "ReasoningItem": {
        "test_other_fields.py::TestResponses::test_reasoning_is_shown_to_templates_again": "summary content",
        "test_other_fields.py::TestResponses::test_encrypted_content_alone_cannot_be_read": "encrypted_content",
        "test_other_fields.py::TestResponses::test_items_come_back_as_they_were": "status",
    },
    "SummaryTextPart": {"test_other_fields.py::TestResponses::test_reasoning_is_shown_to_templates_again": "text"},
    "ReasoningTextPart": {"test_other_fields.py::TestResponses::test_reasoning_is_shown_to_templates_again": "text"},
    "ItemReference": {"responses/test_responses.py::TestChain::test_an_item_is_referred_to": "id"},
    "ConversationRequest": {"responses/test_conversations.py::test_a_conversation_lives_and_ends": "items"},
    "ConversationUpdate": {"responses/test_conversations.py::test_a_conversation_lives_and_ends": "metadata"},
    "ConversationItemsRequest": {"responses/test_conversations.py::test_items_of_every_kind": "items"},
    "MessagesRequest": {
        "anthropic/test_anthropic.py::test_create": "max_tokens stop_sequences temperature top_p top_k",
        "anthropic/test_anthropic.py::test_stream_finishes_cleanly_and_equals_create": "stream",
    },
    "CountTokensRequest": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "anthropic/test_translate.py::test_system_and_turns": "messages system",
        "anthropic/test_anthropic.py::test_tool_loop": "tools",
        "anthropic/test_translate.py::test_tool_choice": "tool_choice",
        "anthropic/test_translate.py::test_thinking": "thinking",
        "anthropic/test_translate.py::test_sampling_and_format": "output_config",
    },
    "MessageParam": {"anthropic/test_translate.py::test_system_and_turns": "role content"},
    "CacheControl": {"anthropic/test_translate.py::test_system_and_turns": "ttl"},
    "Metadata": {"anthropic/test_anthropic.py::test_create": "user_id"},
    "TextBlockParam": {"anthropic/test_translate.py::test_system_and_turns": "text cache_control"},
    "ThinkingBlockParam": {"anthropic/test_translate.py::test_tool_history": "thinking signature"},
    "ToolUseBlockParam": {
        "anthropic/test_translate.py::test_tool_history": "id name input",
        "test_other_fields.py::TestAnthropic::test_an_earlier_call_has_a_direct_caller": "caller",
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "cache_control",
    },
    "ToolResultBlockParam": {
        "anthropic/test_translate.py::test_tool_history": "tool_use_id content is_error",
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "cache_control",
    },
    "ToolParam": {
        "test_other_fields.py::test_inert_parts_of_a_body_change_nothing": "cache_control",
        "anthropic/test_translate.py::test_named_tool_choice_and_strict": "strict",
        "test_other_fields.py::TestAnthropic::test_a_tool": "type name description input_schema "
        "allowed_callers eager_input_streaming",
    },
    "ToolChoiceAuto": {"anthropic/test_anthropic.py::test_one_call_at_most": "disable_parallel_tool_use"},
    "ToolChoiceAny": {"anthropic/test_translate.py::test_tool_choice": "disable_parallel_tool_use"},
    "ToolChoiceTool": {"test_other_fields.py::TestAnthropic::test_a_tool": "name disable_parallel_tool_use"},
    "ThinkingEnabled": {
        "anthropic/test_translate.py::test_thinking": "budget_tokens",
        "anthropic/test_anthropic.py::test_thinking": "display",
    },
    "ThinkingAdaptive": {"anthropic/test_anthropic.py::test_thinking": "display"},
    "OutputConfig": {
        "anthropic/test_translate.py::test_thinking": "effort",
        "anthropic/test_translate.py::test_sampling_and_format": "format",
    },
    "JSONOutputFormat": {"anthropic/test_translate.py::test_sampling_and_format": "schema"},
    "EmbeddingRequest": {
        "pooling/test_embeddings.py::test_base64_is_the_same_numbers_as_little_endian_float32": "encoding_format",
        "pooling/test_embeddings.py::test_vectors_are_of_unit_length_whatever_their_dimensions": "dimensions",
        "pooling/test_embeddings.py::test_raw_vectors": "normalize use_activation",
    },
    "InputFields": {
        "pooling/test_embeddings.py::test_every_shape_of_input": "input",
        "pooling/test_embeddings.py::test_a_chat_is_one_text": "messages add_generation_prompt",
        "pooling/test_embeddings.py::test_special_tokens": "add_special_tokens",
        "pooling/test_embeddings.py::test_cutting_keeps_special_tokens": "truncation_side",
    },
    "PoolingFields": {
        "test_other_fields.py::test_model_is_a_name_that_is_served": "model",
        "pooling/test_embeddings.py::test_cutting_keeps_special_tokens": "truncate_prompt_tokens",
        "pooling/test_embeddings.py::test_priority_and_salt_reach_the_engine": "priority request_id cache_salt",
    },
    "ScoreRequest": {"pooling/test_scoring.py::test_cosine_of_one_text_and_many": "text_1 text_2"},
    "ComparisonFields": {
        "pooling/test_scoring.py::test_a_reranker_is_asked_for_yes_or_no": "instruction",
        "pooling/test_scoring.py::test_documents_and_queries_are_cut": "max_tokens_per_doc max_tokens_per_query",
        "pooling/test_scoring.py::test_one_class_scores_a_pair": "use_activation",
    },
    "TextDocument": {"pooling/test_scoring.py::test_jina_ranks_best_first": "text"},
    "RerankRequest": {
        "pooling/test_scoring.py::test_jina_ranks_best_first": "query documents top_n",
        "pooling/test_scoring.py::test_cohere_shapes": "return_documents",
    },
    "ClassifyRequest": {"pooling/test_scoring.py::test_classify": "use_activation"},
    "BatchRequest": {
        "batches/test_batches.py::test_wrong_batches_are_refused": "input_file_id",
        "batches/test_batches.py::test_other_endpoints": "endpoint",
        "batches/test_batches.py::test_hundred_chats": "completion_window",
        "test_other_fields.py::test_output_of_a_batch_may_expire": "output_expires_after",
    },
    "OutputExpiresAfter": {"test_other_fields.py::test_output_of_a_batch_may_expire": "anchor seconds"},
    "GET /v1/responses/{response_id}": {
        "responses/test_responses.py::TestBackground::test_its_stream_can_be_followed_again": "stream starting_after",
        "test_other_fields.py::TestResponses::test_include_changes_nothing": "include[] include_obfuscation",
    },
    "GET /v1/responses/{response_id}/input_items": {
        "responses/test_responses.py::TestChain::test_input_items_in_pages": "after limit order",
        "test_other_fields.py::TestResponses::test_include_changes_nothing": "include[]",
    },
    "POST /v1/conversations/{conversation_id}/items": {
        "test_other_fields.py::TestResponses::test_include_changes_nothing": "include[]"
    },
    "GET /v1/conversations/{conversation_id}/items": {
        "responses/test_responses.py::TestChain::test_input_items_in_pages": "after limit order",
        "test_other_fields.py::TestResponses::test_include_changes_nothing": "include[]",
    },
    "GET /v1/conversations/{conversation_id}/items/{item_id}": {
        "test_other_fields.py::TestResponses::test_include_changes_nothing": "include[]"
    },
    "POST /v1/files": {
        "batches/test_files.py::test_a_file_comes_back_as_it_was": "file purpose",
        "batches/test_files.py::test_wrong_forms": "expires_after[anchor] expires_after[seconds]",
    },
    "GET /v1/files": {"batches/test_files.py::test_lists_by_purpose_order_and_page": "purpose limit after order"},
    "GET /v1/batches": {"batches/test_batches.py::test_pages_and_unknown_ids": "limit after"},
    "ChatTool": {"openai/test_tools.py::test_a_whole_call": "function"},
    "SamplingFields": {
        "openai/test_fields.py::test_sampling_fields_reach_the_engine": "frequency_penalty "
        "presence_penalty "
        "repetition_penalty "
        "stop_token_ids ignore_eos "
        "min_tokens "
        "include_stop_str_in_output "
        "skip_special_tokens",
        "openai/test_chat.py::test_sampling_is_the_requests_then_the_models_then_openais": "logit_bias "
        "seed "
        "temperature "
        "top_p top_k "
        "min_p",
        "openai/test_chat.py::test_stop_in_every_shape": "stop",
        "openai/test_chat.py::test_engine_extras_reach_the_engine": "priority cache_salt",
    },
}
"""Where fields are declared -> test -> the fields it shows; more in tests/serving/api_surface.py."""
