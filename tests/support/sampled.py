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
        "test_codes_and_scales_are_those_of_the_reference": 9,
        "test_long_contexts_are_split_over_threads": 3,
        "test_matches_oracle": 10,
        "test_queries_of_bfloat16": 3,
        "test_random_batches_match_oracle": 8,
    },
    "cpu_kernels/test_same_bits.py": {
        "test_attention": 14,
    },
    "engine/core/test_sampler.py": {
        "test_top_tokens_are_those_of_a_full_sort": 4,
    },
    "engine/core/test_saved.py": {
        "test_a_loaded_step_does_what_the_compiled_one_did": 2,
    },
    "engine/features/grammar/test_grammar.py": {
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
        "test_parameters_are_as_many_as_published": 14,
        "test_settings_are_those_that_transformers_reads": 8,
        "test_steps_have_the_shapes_of_the_model": 24,
        "test_the_whole_context_is_planned": 9,
    },
    "models/test_quantized_checkpoints.py": {
        "test_the_cpu_kernels_take_what_their_tiles_hold": 3,
    },
    "pallas_kernels/gpu/test_attention.py": {
        "test_half_precision_accumulates_in_float32": 2,
        "test_lowers_for_cuda": 4,
        "test_programs_take_turns_at_the_splits": 2,
        "test_quantized_pages_are_read_and_written_as_by_the_reference": 6,
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
        "test_every_kind_with_a_kernel_is_expanded_right": 6,
        "test_few_rows": 8,
        "test_few_rows_of_each_group": 14,
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
        "test_tokens_read_what_those_before_them_wrote": 17,
    },
    "pallas_kernels/test_packed_attention.py": {
        "test_each_text_attends_to_itself": 4,
    },
    "pallas_kernels/test_quantized_pages.py": {
        "test_attention_over_rounded_keys_and_values": 4,
    },
    "pallas_kernels/test_reference.py": {
        "test_half_precision_accumulates_in_float32": 2,
        "test_matches_oracle": 9,
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
        "test_constant_weights_survive": 9,
        "test_one_large_weight_in_a_block_of_zeros": 4,
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
    "tpu/test_lowered.py": {
        "test_a_step_attends_through_jaxs_kernel_over_pages_in_place": 4,
    },
}
"""By test, a number n: of its cases, in the order in which pytest finds them, each nth is run, from the first on."""
