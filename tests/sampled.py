"""Tests of many cases, of which `make test` runs a sample; `make test-all` runs all of them.

The cases of a test are of one kind: a sample sees what would break all of them, and the rest what breaks one alone.
Nothing is left out because it fails. The names are those of files under `tests/`, and of their tests.
"""

from __future__ import annotations

EVERY: dict[str, dict[str, int]] = {
    "cli/convert/test_conversion.py": {
        "test_an_orbax_directory_says_what_its_source_says": 3,
        "test_packed_weights_are_expanded_for_other_programs": 2,
    },
    "cli/convert/test_merging.py": {
        "test_adapters_of_hugging_face_go_into_gguf_files": 3,
    },
    "cli/test_help.py": {
        "test_help_is_the_same_without_docstrings": 2,
        "test_shells_complete_commands_and_flags": 3,
    },
    "cli/test_settings.py": {
        "test_every_field_is_a_flag_a_variable_and_a_key": 8,
    },
    "cli/test_streams.py": {
        "test_a_server_answers_without_standard_streams": 2,
        "test_an_output_that_cannot_be_written_is_one_line": 3,
    },
    "cpu_kernels/test_attention.py": {
        "test_matches_oracle": 2,
        "test_random_batches_match_oracle": 6,
    },
    "cpu_kernels/test_products.py": {
        "test_an_mlp_is_its_products_one_after_the_other": 4,
    },
    "cpu_kernels/test_quantized_pages.py": {
        "test_codes_and_scales_are_those_of_the_reference": 5,
        "test_long_contexts_are_split_over_threads": 3,
        "test_matches_oracle": 7,
        "test_queries_of_bfloat16": 3,
        "test_random_batches_match_oracle": 8,
    },
    "cpu_kernels/test_same_bits.py": {
        "test_attention": 7,
    },
    "engine/device/test_sampler.py": {
        "test_top_tokens_are_those_of_a_full_sort": 4,
    },
    "engine/device/test_saved.py": {
        "test_a_loaded_step_does_what_the_compiled_one_did": 2,
    },
    "engine/test_grammar.py": {
        "test_a_model_that_does_not_reason_is_constrained_whatever_the_marks": 3,
        "test_reasoning_may_come_first_whole": 5,
    },
    "fuzz/test_chat_template.py": {
        "test_a_template_without_end_is_stopped_and_the_next_one_renders": 4,
    },
    "models/test_config_keys.py": {
        "test_a_key_is_read_or_refused": 6,
        "test_what_transformers_itself_writes_is_read": 6,
    },
    "models/test_encoders.py": {
        "test_a_text_alone": 3,
        "test_texts_beside_each_other_do_not_see_each_other": 2,
    },
    "models/test_gguf_round_trip.py": {
        "test_gguf_loads_to_the_same_parameters": 4,
        "test_gguf_metadata_gives_the_same_config": 2,
    },
    "models/test_mixed_kinds.py": {
        "test_logits_are_those_of_weights_rounded_the_same_way": 3,
    },
    "models/test_moe.py": {
        "test_layer_in_bfloat16": 2,
        "test_layer_is_the_dense_mixture": 3,
        "test_number_of_tokens": 2,
    },
    "models/test_published_configs.py": {
        "test_parameters_are_as_many_as_published": 8,
        "test_settings_are_those_that_transformers_reads": 4,
        "test_steps_have_the_shapes_of_the_model": 16,
        "test_the_whole_context_is_planned": 4,
    },
    "models/test_quantized_checkpoints.py": {
        "test_the_cpu_kernels_take_what_their_tiles_hold": 3,
    },
    "pallas_kernels/gpu/test_attention.py": {
        "test_half_precision_accumulates_in_float32": 2,
        "test_lowers_for_cuda": 4,
        "test_programs_take_turns_at_the_splits": 2,
        "test_quantized_pages_are_read_and_written_as_by_the_reference": 3,
        "test_splits_combine_to_the_same": 2,
    },
    "pallas_kernels/gpu/test_block_scaled.py": {
        "test_few_rows": 12,
        "test_tiles_of_each_groups_rows": 8,
    },
    "pallas_kernels/gpu/test_experts.py": {
        "test_a_correction_bias_counts_for_the_choice_only": 2,
        "test_experts_are_the_dense_mixture": 2,
        "test_experts_that_are_elsewhere_get_nobody": 3,
        "test_number_of_tokens": 2,
        "test_one_expert_gets_all": 2,
        "test_padding_chooses_nobody": 2,
        "test_routing": 6,
        "test_rows_are_listed_by_group": 4,
        "test_the_group_of_each_row_is_found_again": 2,
    },
    "pallas_kernels/gpu/test_int8.py": {
        "test_inputs_are_rounded_as_in_plain_xla": 3,
        "test_sums_of_integers": 8,
        "test_tiles_of_each_groups_rows": 3,
    },
    "pallas_kernels/gpu/test_latent.py": {
        "test_half_precision": 2,
        "test_queries_are_absorbed_and_latents_stored": 6,
        "test_values_are_expanded": 5,
    },
    "pallas_kernels/gpu/test_matmul.py": {
        "test_every_kind_with_a_kernel_is_expanded_right": 3,
        "test_few_rows": 8,
        "test_few_rows_of_each_group": 7,
        "test_one_matrix": 4,
    },
    "pallas_kernels/gpu/test_ordered.py": {
        "test_each_expert_has_an_order_of_its_own": 4,
        "test_inputs_are_brought_into_the_columns_order": 4,
    },
    "pallas_kernels/gpu/test_packed.py": {
        "test_what_is_expanded_in_memory_is_expanded_exactly": 4,
    },
    "pallas_kernels/test_causal_conv.py": {
        "test_each_token_sees_those_before_it": 3,
    },
    "pallas_kernels/test_delta_rule.py": {
        "test_tokens_read_what_those_before_them_wrote": 10,
    },
    "pallas_kernels/test_packed_attention.py": {
        "test_each_text_attends_to_itself": 4,
    },
    "pallas_kernels/test_quantized_pages.py": {
        "test_attention_over_rounded_keys_and_values": 4,
    },
    "pallas_kernels/test_reference.py": {
        "test_half_precision_accumulates_in_float32": 2,
        "test_matches_oracle": 6,
        "test_pages_kept_as_bits_give_the_same_to_the_last_bit": 6,
        "test_random_batches_match_oracle": 3,
    },
    "pallas_kernels/test_ssd.py": {
        "test_the_kernel_of_a_gpu": 3,
        "test_tokens_read_what_those_before_them_left": 8,
    },
    "pallas_kernels/test_tpu_attention.py": {
        "test_matches_oracle": 6,
        "test_random_batches_match_oracle": 3,
    },
    "quantization/test_encoders.py": {
        "test_constant_weights_survive": 4,
    },
    "quantization/test_gpu_tiles.py": {
        "test_a_devices_part_is_whole_tiles": 2,
        "test_groups_are_the_same_in_tiles": 6,
        "test_tiles_hold_the_file_bit_for_bit": 6,
    },
    "quantization/test_products.py": {
        "test_experts": 4,
        "test_latent_attention_uses_rows_head_by_head": 3,
        "test_products_go_tile_by_tile": 4,
    },
    "research/test_captured_keys.py": {
        "test_keys_and_values_are_as_transformers_holds_them": 3,
    },
    "research/test_captures.py": {
        "test_every_point_of_a_prompt_is_as_transformers_has_it": 3,
        "test_the_lens_at_the_last_layer_is_the_head": 4,
    },
    "research/test_model.py": {
        "test_the_model_finds_what_the_sampler_said_likely": 20,
    },
    "research/test_new_weights.py": {
        "test_it_is_as_if_started_with_them": 5,
        "test_what_cannot_be_used_changes_nothing": 2,
    },
    "research/test_steering.py": {
        "test_steered_and_plain_requests_share_a_batch": 2,
    },
    "serving/http/test_openapi.py": {
        "test_any_request_is_answered_as_described": 3,
        "test_what_changes_a_server_is_answered_as_described": 2,
    },
    "serving/parsing/test_cut.py": {
        "test_a_cut_call_is_no_content": 3,
    },
    "serving/parsing/test_grammar.py": {
        "test_raw_strings_are_held_to_their_schema": 9,
        "test_required_calls": 6,
        "test_whatever_is_allowed_parses_back": 20,
    },
    "serving/parsing/test_parser.py": {
        "test_work_grows_with_the_text_and_no_faster": 4,
    },
    "serving/test_processes.py": {
        "test_requests_are_told_that_a_process_has_left": 2,
    },
    "serving/test_thinking.py": {
        "test_a_constraint_does_not_wait_for_reasoning_that_may_never_come": 7,
    },
    "test_disaggregated.py": {
        "test_other_models": 2,
        "test_quantized_pages": 2,
        "test_settings_that_do_not_agree": 3,
        "test_tokens_are_those_of_one_engine": 3,
    },
    "test_lifecycle.py": {
        "test_a_program_that_just_ends_ends_at_once": 3,
    },
    "test_logs.py": {
        "test_a_command_line_that_is_wrong_says_so_in_one_line": 2,
    },
    "test_own_process.py": {
        "test_a_program_without_a_main_guard_has_an_engine_process": 2,
    },
    "test_peft_options.py": {
        "test_a_request_gets_what_peft_says": 3,
    },
    "tpu/test_lowered.py": {
        "test_a_step_attends_through_jaxs_kernel_over_pages_in_place": 4,
    },
}
"""By test, a number n: of its cases, in the order in which pytest finds them, each nth is run, from the first on."""

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "cli/convert/test_conversion.py": {
        "test_packed_weights_are_saved_as_they_are": ("llama:gptq_128", "mixtral:mxfp4"),
    },
    "cli/convert/test_merging.py": {
        "test_the_merged_model_says_what_peft_says": ("plain", "tied_head"),
    },
    "engine/device/test_compiled_step.py": {
        "test_donated_pages_are_not_copied": ("bfloat16-decode", "bfloat16-sampled", "bfloat16-backbone"),
    },
    "engine/device/test_device.py": {
        "test_a_device_that_is_sent_the_same_messages_holds_the_same": ("more0-kinds0",),
    },
    "engine/front/test_sleep.py": {
        "test_at_level_1_the_files_of_the_weights_are_not_read_again": ("1",),
        "test_it_answers_the_same_after_a_sleep": ("1-1",),
        "test_weights_of_another_plan_are_refused_and_then_forgotten": ("1",),
    },
    "engine/test_thinking_budget.py": {
        "TestModelsOwnMarkers::test_a_marker_that_has_begun_is_finished": ("four steps a dispatch",),
        "TestModelsOwnMarkers::test_an_answer_without_reasoning_is_left_alone": ("four steps a dispatch",),
        "TestModelsOwnMarkers::test_an_earlier_end_is_the_end": ("four steps a dispatch",),
        "TestModelsOwnMarkers::test_the_budget_begins_behind_the_opening": (
            "four steps a dispatch-0",
            "four steps a dispatch-1",
            "four steps a dispatch-4",
        ),
        "test_a_forced_tokens_log_probability_is_the_models_own": ("four steps a dispatch",),
        "test_a_grammar_begins_behind_the_forced_marker": ("four steps a dispatch",),
        "test_a_grammar_that_covers_the_reasoning": ("four steps a dispatch",),
        "test_an_unbudgeted_step_is_the_same_executable_as_before": ("four steps a dispatch",),
        "test_batch_mates_stay_what_they_are_and_a_recompute_keeps_its_place": ("four steps a dispatch",),
        "test_cached_prefixes_change_nothing": ("four steps a dispatch",),
        "test_markers_must_be_known": ("four steps a dispatch",),
        "test_penalties_and_biases_go_with_it": ("four steps a dispatch",),
        "test_stop_strings_see_the_marker": ("four steps a dispatch",),
        "test_the_marker_comes_when_the_budget_is_spent": (
            "four steps a dispatch-0-one token",
            "drafts-0-several tokens",
        ),
        "test_what_cannot_be_forced_fails_alone": ("four steps a dispatch",),
    },
    "models/test_cpu_kernels.py": {
        "test_float32_says_what_transformers_says": (
            "llama_gqa",
            "gemma3_small",
            "ernie4_5_moe",
            "gpt_neox",
            "qwen3_5",
        ),
        "test_weights_in_tiles_are_the_references": ("q4_0",),
    },
    "models/test_gpu_kernels.py": {
        "test_float32_says_what_transformers_says": ("qwen3_moe",),
        "test_what_kernels_do_not_do_is_not_left_to_them": ("olmo2",),
    },
    "models/test_mla.py": {
        "test_outputs_are_the_definition_s": ("q_lora-reference",),
    },
    "models/test_mtp.py": {
        "test_what_the_head_reads_is_as_defined": ("qwen3_5",),
    },
    "models/test_packed.py": {
        "test_a_packed_gguf_gives_the_logits_of_its_expansion": ("llama_gqa", "qwen2_moe"),
    },
    "models/test_parity.py": {
        "test_a_prompt_in_one_chunk": (
            "llama_gqa",
            "llama_dynamic_rope_past",
            "llama4",
            "phi",
            "qwen2_window",
            "qwen3_5_moe",
            "gemma2",
            "gemma4",
            "deepseek_v2_lite",
            "lfm2_moe",
            "exaone4",
            "hunyuan_moe",
            "granite4",
            "mpt_clipped",
        ),
        "test_a_prompt_in_ragged_chunks": (
            "llama_gqa-(7, 9, 16, 33, 48, 63)",
            "llama_dynamic_rope_past-(7, 9, 16, 33, 48, 63)",
            "llama4-(7, 9, 16, 33, 48, 63)",
            "phi-(7, 9, 16, 33, 48, 63)",
            "qwen2_window-(7, 9, 16, 33, 48, 63)",
            "qwen3_5_moe-(7, 9, 16, 33, 48, 63)",
            "gemma2-(7, 9, 16, 33, 48, 63)",
            "gemma4-(7, 9, 16, 33, 48, 63)",
            "deepseek_v2_lite-(7, 9, 16, 33, 48, 63)",
            "lfm2_moe-(7, 9, 16, 33, 48, 63)",
            "exaone4-(7, 9, 16, 33, 48, 63)",
            "hunyuan_moe-(7, 9, 16, 33, 48, 63)",
            "granite4-(7, 9, 16, 33, 48, 63)",
            "mpt_clipped-(7, 9, 16, 33, 48, 63)",
        ),
        "test_greedy_decoding_after_the_prompt": ("llama_gqa", "qwen3_5_moe", "lfm2_moe"),
        "test_prompts_beside_each_other_at_different_places": (
            "llama_gqa",
            "llama_dynamic_rope_past",
            "llama4",
            "phi",
            "qwen2_window",
            "qwen3_5_moe",
            "gemma2",
            "gemma4",
            "deepseek_v2_lite",
            "lfm2_moe",
            "exaone4",
            "hunyuan_moe",
            "granite4",
            "mpt_clipped",
        ),
        "test_token_by_token": (
            "llama_gqa",
            "ministral3_text",
            "phi3_longrope_short",
            "qwen3_embedding",
            "qwen3_moe_unnormalised",
            "qwen3_5_moe",
            "stablelm_qkv_bias",
            "gemma3_softcap",
            "deepseek_v3",
            "glm4_no_bias",
            "lfm2_moe",
            "cohere2",
            "starcoder2",
            "nemotron_h",
            "gpt_neox_in_turn",
        ),
    },
    "models/test_quantized_checkpoints.py": {
        "test_a_packed_checkpoint_gives_the_logits_of_its_numbers": (
            "llama:gptq_sorted",
            "llama:compressed_w8a16",
            "llama:bitsandbytes_int8",
            "mixtral:gptq_sorted_each",
        ),
    },
    "models/test_tensor_parallel.py": {
        "test_logits_are_the_goldens": ("layouts",),
        "test_quantized_weights_are_the_same_on_any_number_of_devices": ("one of each",),
    },
    "pallas_kernels/gpu/test_attention.py": {
        "test_heads_are_normed_and_rotated_on_the_way": ("64-True-64-normed",),
        "test_matches_oracle": (
            "decode",
            "mixed, slopes, window, softcap, sinks",
            "prefill, D=256, multi-query",
            "latent, decode, 512 and 64",
        ),
    },
    "pallas_kernels/gpu/test_packed.py": {
        "test_codes_are_exact_in_16_bits": ("Q6_K-bfloat16", "MXFP4-bfloat16"),
        "test_every_way_to_cut_it_gives_the_same": (
            "Q5_K-Tiling(warps=2, tiles=3, step=256, stages=3, programs=1024, least=512, ahead=False, scaled=False)",
        ),
        "test_experts": ("Q4_0-24-2",),
        "test_few_rows": ("Q4_0", "8 bits"),
        "test_many_rows": ("8 bits, symmetric-40",),
    },
    "quantization/test_encoders.py": {
        "test_errors_are_small_where_an_importance_matrix_says": ("Q6_K", "Q5_1"),
        "test_k_quants_are_as_good_as_llama_cpps": ("normal-Q2_K", "normal-Q5_K"),
        "test_others_are_no_worse_than_ggufs": ("normal-Q4_0", "normal-Q5_1"),
    },
    "research/test_captured_keys.py": {
        "test_they_are_what_attention_shows": ("gemma3_small",),
    },
    "research/test_captures.py": {
        "test_completions_are_captured_beside_requests_that_are_not": ("llama_gqa",),
        "test_only_the_positions_that_are_asked_for": ("llama_gqa-last", "lfm2-positions2"),
        "test_the_stream_is_the_sum_of_what_is_added_to_it": ("falcon_h1",),
    },
    "research/test_logits_processors.py": {
        "test_tokens_are_those_that_numpy_chooses": ("llama_gqa",),
    },
    "research/test_model.py": {
        "test_the_derivative_is_what_torch_finds": ("llama_gqa", "lfm2_moe"),
    },
    "research/test_patching.py": {
        "test_a_patched_request_is_as_transformers_has_it": ("llama_gqa-prompt", "llama_gqa-generated"),
        "test_patched_and_plain_requests_share_a_batch": ("llama_gqa",),
        "test_several_tokens_a_step_and_drafts": ("lfm2",),
    },
    "research/test_steering.py": {
        "test_a_steered_request_is_as_transformers_has_it": ("lfm2-all", "lfm2-part"),
        "test_several_tokens_a_step_and_drafts": ("lfm2",),
    },
    "serving/pooling/test_scoring.py": {
        "test_a_real_classifier_answers_as_transformers_does": ("qwen3_classifier",),
    },
    "serving/test_engine_process.py": {
        "test_a_signal_ends_a_server_whose_engine_reads_nothing": ("15",),
    },
    "test_adapters.py": {
        "test_an_adapter_gives_what_the_merged_model_gives": ("llama_gqa",),
        "test_an_adapter_that_cannot_be_used_fails_its_request_alone": ("llama_gqa-rank", "llama_gqa-nowhere"),
        "test_more_adapters_than_places_take_turns": ("llama_gqa",),
        "test_prompts_are_scored_with_adapters": ("llama_gqa",),
        "test_requests_with_other_adapters_and_without_share_steps": ("llama_gqa",),
        "test_several_adapters_add_up_each_with_its_scale": ("llama_gqa",),
    },
    "test_cpu_kernels.py": {
        "test_a_greedy_token_is_the_same_with_and_without_scores": ("smollm2-135m",),
        "test_prompts_are_as_likely_as_transformers_finds_them": ("smollm2-135m",),
    },
    "test_draft_models.py": {
        "test_a_draft_model_runs_prompts_beside_the_model": ("llama_gqa-llama_gqa",),
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("llama_gqa-llama_gqa",),
    },
    "test_drafts.py": {
        "test_a_text_that_repeats_itself_takes_fewer_steps": ("llama_gqa",),
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("llama_gqa",),
        "test_requests_that_wait_for_others_to_end_do_not_keep_these_from_trying_ahead": ("llama_gqa",),
        "test_the_end_of_the_context_is_reached_and_not_passed": ("llama_gqa",),
        "test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts": ("llama_gqa",),
    },
    "test_drafts_on_states.py": {
        "test_an_answer_goes_on_from_the_state_that_drafts_have_left": ("lfm2",),
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("lfm2",),
        "test_choices_of_a_prompt_go_on_from_one_state": ("lfm2",),
    },
    "test_examples.py": {
        "test_what_the_examples_ask_is_known_by_a_margin": ("auto",),
    },
    "test_goldens.py": {
        "test_greedy_tokens": ("smollm2-135m",),
        "test_prompt_logprobs": ("smollm2-135m",),
        "test_text_is_tokenized_as_the_reference_tokenizes_it": ("smollm2-135m",),
    },
    "test_invariance.py": {
        "test_after_a_prefix_hit": ("gemma3_linear_rope",),
        "test_after_preemption": ("gemma3_linear_rope",),
        "test_choices_of_one_prompt_differ_and_repeat": ("gemma3_linear_rope",),
        "test_chunked_at_every_boundary": ("gemma3_linear_rope-17",),
        "test_in_a_batch_of_unlike_requests": ("gemma3_linear_rope",),
        "test_several_tokens_a_dispatch": ("gemma3_linear_rope",),
    },
    "test_llm.py": {
        "test_whole_vocabularies_of_generated_tokens": ("way0-fields0",),
    },
    "test_mtp.py": {
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("qwen3_5",),
        "test_drafts_are_those_of_the_definition": ("qwen3_5-differently0",),
    },
    "test_offload.py": {
        "test_a_prompt_is_found_again_in_host_memory": ("deepseek_v3",),
        "test_in_other_engines": ("{'kv_cache_dtype': 'int8'}",),
    },
    "test_quantized_pages.py": {
        "test_the_cpu_kernels_score_as_plain_xla_does": ("llama_gqa-fp8", "deepseek_v3-int8"),
        "test_tokens_are_the_same_however_a_request_is_run": ("llama_gqa-int8",),
    },
    "test_same_answer.py": {
        "test_layers_with_a_state": ("lfm2",),
    },
    "test_states.py": {
        "test_a_prefix_hit_continues_as_transformers_does": ("lfm2", "falcon_h1"),
        "test_every_beginning_of_a_prompt_gives_the_token_that_transformers_gives": ("lfm2", "falcon_h1"),
        "test_many_together_give_what_each_gives_alone": ("lfm2-decode_steps",),
        "test_of_a_chats_first_turn_hardly_anything_is_computed_again": ("lfm2",),
    },
    "test_two_processes.py": {
        "test_a_process_that_fails_ends_the_group_with_a_line": ("kill",),
    },
    "text/test_llama_cpp_tokens.py": {
        "test_tokens_are_those_of_llama_cpp": ("smollm2-135m",),
    },
}
"""Of the cases of a test, those that are run."""
