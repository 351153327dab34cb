"""Tests of many cases, of which `make test` runs a sample; `make test-all` runs all of them.

The cases of a test are of one kind: a sample sees what would break all of them, and the rest what breaks one alone.
Nothing is left out because it fails. The names are those of files under `tests/`, and of their tests.
"""

from __future__ import annotations

EVERY: dict[str, dict[str, int]] = {
    "cli/convert/test_conversion.py": {
        "test_an_orbax_directory_says_what_its_source_says": 3,
        "test_packed_weights_are_saved_as_they_are": 4,
    },
    "cli/convert/test_merging.py": {
        "test_adapters_of_hugging_face_go_into_gguf_files": 3,
        "test_the_merged_model_says_what_peft_says": 4,
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
        "test_random_batches_match_oracle": 3,
    },
    "cpu_kernels/test_products.py": {
        "test_an_mlp_is_its_products_one_after_the_other": 4,
    },
    "cpu_kernels/test_quantized_pages.py": {
        "test_long_contexts_are_split_over_threads": 3,
        "test_matches_oracle": 3,
        "test_random_batches_match_oracle": 4,
    },
    "cpu_kernels/test_same_bits.py": {
        "test_attention": 3,
    },
    "engine/device/test_saved.py": {
        "test_a_loaded_step_does_what_the_compiled_one_did": 2,
    },
    "engine/test_grammar.py": {
        "test_a_model_that_does_not_reason_is_constrained_whatever_the_marks": 3,
        "test_reasoning_may_come_first_whole": 5,
    },
    "engine/test_thinking_budget.py": {
        "test_batch_mates_stay_what_they_are_and_a_recompute_keeps_its_place": 3,
    },
    "fuzz/test_chat_template.py": {
        "test_a_template_without_end_is_stopped_and_the_next_one_renders": 4,
    },
    "models/test_config_keys.py": {
        "test_a_key_is_read_or_refused": 3,
        "test_what_transformers_itself_writes_is_read": 3,
    },
    "models/test_cpu_kernels.py": {
        "test_float32_says_what_transformers_says": 3,
        "test_weights_in_tiles_are_the_references": 3,
    },
    "models/test_encoders.py": {
        "test_a_text_alone": 3,
    },
    "models/test_gguf_round_trip.py": {
        "test_gguf_loads_to_the_same_parameters": 2,
    },
    "models/test_gpu_kernels.py": {
        "test_what_kernels_do_not_do_is_not_left_to_them": 4,
    },
    "models/test_mixed_kinds.py": {
        "test_logits_are_those_of_weights_rounded_the_same_way": 3,
    },
    "models/test_mla.py": {
        "test_outputs_are_the_definition_s": 3,
    },
    "models/test_moe.py": {
        "test_layer_is_the_dense_mixture": 3,
    },
    "models/test_packed.py": {
        "test_a_packed_gguf_gives_the_logits_of_its_expansion": 3,
    },
    "models/test_parity.py": {
        "test_a_prompt_in_one_chunk": 4,
        "test_a_prompt_in_ragged_chunks": 16,
        "test_greedy_decoding_after_the_prompt": 4,
        "test_prompts_beside_each_other_at_different_places": 4,
        "test_token_by_token": 4,
    },
    "models/test_published_configs.py": {
        "test_parameters_are_as_many_as_published": 4,
        "test_settings_are_those_that_transformers_reads": 4,
        "test_steps_have_the_shapes_of_the_model": 8,
        "test_the_whole_context_is_planned": 4,
    },
    "models/test_quantized_checkpoints.py": {
        "test_a_packed_checkpoint_gives_the_logits_of_its_numbers": 4,
        "test_the_cpu_kernels_take_what_their_tiles_hold": 3,
    },
    "pallas_kernels/gpu/test_attention.py": {
        "test_heads_are_normed_and_rotated_on_the_way": 3,
        "test_lowers_for_cuda": 4,
        "test_matches_oracle": 3,
        "test_quantized_pages_are_read_and_written_as_by_the_reference": 3,
    },
    "pallas_kernels/gpu/test_block_scaled.py": {
        "test_few_rows": 4,
        "test_tiles_of_each_groups_rows": 4,
    },
    "pallas_kernels/gpu/test_experts.py": {
        "test_experts_are_the_dense_mixture": 2,
        "test_routing": 3,
    },
    "pallas_kernels/gpu/test_int8.py": {
        "test_sums_of_integers": 4,
    },
    "pallas_kernels/gpu/test_latent.py": {
        "test_queries_are_absorbed_and_latents_stored": 3,
    },
    "pallas_kernels/gpu/test_matmul.py": {
        "test_every_kind_with_a_kernel_is_expanded_right": 3,
        "test_few_rows": 4,
    },
    "pallas_kernels/gpu/test_ordered.py": {
        "test_each_expert_has_an_order_of_its_own": 4,
    },
    "pallas_kernels/gpu/test_packed.py": {
        "test_codes_are_exact_in_16_bits": 4,
        "test_every_way_to_cut_it_gives_the_same": 4,
        "test_experts": 3,
        "test_few_rows": 4,
        "test_many_rows": 3,
        "test_what_is_expanded_in_memory_is_expanded_exactly": 4,
    },
    "pallas_kernels/test_causal_conv.py": {
        "test_each_token_sees_those_before_it": 3,
    },
    "pallas_kernels/test_delta_rule.py": {
        "test_tokens_read_what_those_before_them_wrote": 5,
    },
    "pallas_kernels/test_packed_attention.py": {
        "test_each_text_attends_to_itself": 4,
    },
    "pallas_kernels/test_quantized_pages.py": {
        "test_attention_over_rounded_keys_and_values": 4,
    },
    "pallas_kernels/test_reference.py": {
        "test_matches_oracle": 3,
        "test_pages_kept_as_bits_give_the_same_to_the_last_bit": 3,
    },
    "pallas_kernels/test_ssd.py": {
        "test_tokens_read_what_those_before_them_left": 5,
    },
    "pallas_kernels/test_tpu_attention.py": {
        "test_matches_oracle": 3,
    },
    "quantization/test_encoders.py": {
        "test_errors_are_small_where_an_importance_matrix_says": 4,
        "test_k_quants_are_as_good_as_llama_cpps": 3,
        "test_others_are_no_worse_than_ggufs": 3,
    },
    "quantization/test_gpu_tiles.py": {
        "test_groups_are_the_same_in_tiles": 3,
        "test_tiles_hold_the_file_bit_for_bit": 3,
    },
    "quantization/test_products.py": {
        "test_experts": 4,
        "test_products_go_tile_by_tile": 4,
    },
    "research/test_captured_keys.py": {
        "test_keys_and_values_are_as_transformers_holds_them": 3,
    },
    "research/test_captures.py": {
        "test_completions_are_captured_beside_requests_that_are_not": 3,
        "test_every_point_of_a_prompt_is_as_transformers_has_it": 3,
        "test_only_the_positions_that_are_asked_for": 7,
        "test_the_lens_at_the_last_layer_is_the_head": 4,
    },
    "research/test_model.py": {
        "test_the_derivative_is_what_torch_finds": 3,
        "test_the_model_finds_what_the_sampler_said_likely": 20,
    },
    "research/test_new_weights.py": {
        "test_it_is_as_if_started_with_them": 5,
        "test_what_cannot_be_used_changes_nothing": 2,
    },
    "research/test_patching.py": {
        "test_a_patched_request_is_as_transformers_has_it": 3,
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
        "test_raw_strings_are_held_to_their_schema": 3,
        "test_required_calls": 6,
        "test_whatever_is_allowed_parses_back": 10,
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
    "test_drafts.py": {
        "test_a_text_that_repeats_itself_takes_fewer_steps": 3,
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
    "test_states.py": {
        "test_a_prefix_hit_continues_as_transformers_does": 4,
        "test_every_beginning_of_a_prompt_gives_the_token_that_transformers_gives": 4,
    },
    "tpu/test_lowered.py": {
        "test_a_step_attends_through_jaxs_kernel_over_pages_in_place": 4,
    },
}
"""By test, a number n: of its cases, in the order in which pytest finds them, each nth is run, from the first on."""

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "engine/device/test_device.py": {
        "test_a_device_that_is_sent_the_same_messages_holds_the_same": ("more0-kinds0",),
    },
    "engine/front/test_sleep.py": {
        "test_at_level_1_the_files_of_the_weights_are_not_read_again": ("1",),
        "test_it_answers_the_same_after_a_sleep": ("1-1",),
        "test_weights_of_another_plan_are_refused_and_then_forgotten": ("1",),
    },
    "engine/test_thinking_budget.py": {
        "test_the_marker_comes_when_the_budget_is_spent": (
            "four steps a dispatch-0-several tokens",
            "one step-0-one token",
        ),
    },
    "models/test_gpu_kernels.py": {
        "test_float32_says_what_transformers_says": ("qwen3_moe",),
    },
    "models/test_tensor_parallel.py": {
        "test_logits_are_the_goldens": ("layouts", "encoders"),
    },
    "research/test_logits_processors.py": {
        "test_tokens_are_those_that_numpy_chooses": ("llama_gqa",),
    },
    "research/test_patching.py": {
        "test_several_tokens_a_step_and_drafts": ("lfm2",),
    },
    "research/test_steering.py": {
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
        "test_prompts_are_scored_with_adapters": ("phi3",),
        "test_requests_with_other_adapters_and_without_share_steps": ("llama_gqa",),
        "test_several_adapters_add_up_each_with_its_scale": ("qwen2",),
    },
    "test_cpu_kernels.py": {
        "test_a_greedy_token_is_the_same_with_and_without_scores": ("smollm2-135m",),
        "test_prompts_are_as_likely_as_transformers_finds_them": ("smollm2-135m",),
    },
    "test_draft_models.py": {
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("llama_gqa-llama_gqa",),
    },
    "test_drafts.py": {
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": ("llama_gqa",),
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
    },
    "test_quantized_pages.py": {
        "test_tokens_are_the_same_however_a_request_is_run": ("llama_gqa-int8",),
    },
    "test_same_answer.py": {
        "test_drafts_change_no_bit_of_layers_with_a_state": ("qwen3_5",),
        "test_layers_with_a_state": ("lfm2",),
    },
    "test_states.py": {
        "test_many_together_give_what_each_gives_alone": ("lfm2-decode_steps",),
    },
    "test_two_processes.py": {
        "test_a_process_that_fails_ends_the_group_with_a_line": ("kill",),
    },
    "text/test_llama_cpp_tokens.py": {
        "test_tokens_are_those_of_llama_cpp": ("smollm2-135m",),
    },
}
"""Of the cases of a test, those that are run."""
