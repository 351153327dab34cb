"""What `make test` leaves to `make test-all`, so that it takes minutes.

Whole tests are named here, and cases of tests in `tests.support.sampled` and `tests.support.kept`. Nothing is left out
because it fails. The names are those of files under `tests/`, and of their tests.
"""

from __future__ import annotations

import pytest

from tests.support.kept import KEPT
from tests.support.sampled import EVERY

ELSEWHERE: dict[str, dict[str, str]] = {
    "chaos/test_chaos.py": {
        "test_a_short_run": "tests/serving/test_stress.py",
    },
    "cli/test_profile.py": {
        "test_a_trace_of_the_steps_is_written": "tests/research/test_explained.py, in one process",
    },
    "cpu_kernels/test_build.py": {
        "test_a_library_of_few_sets_chooses_among_them": "test_some_instruction_sets_are_compiled_by_themselves",
    },
    "engine/doors/test_process_client.py": {
        "test_an_engine_that_cannot_fit_does_not_ask": "test_an_engine_without_room_ends",
    },
    "engine/doors/test_sleep.py": {
        "test_it_asks_for_its_room_again": "test_an_engine_asks_for_room_before_it_takes_any",
    },
    "models/test_baichuan.py": {
        "test_13b_attends_less_to_what_is_far_away": "tests/models/test_alibi.py",
    },
    "models/test_gpu_checkpoints.py": {
        "test_a_packed_checkpoint_gives_the_logits_of_its_numbers": "tests/pallas_kernels/gpu",
        "test_bfloat16_is_as_close_as_in_plain_xla": "tests/pallas_kernels/gpu/test_block_scaled.py",
        "test_rounded_inputs_give_the_logits_of_plain_xla": "tests/pallas_kernels/gpu/test_int8.py",
    },
    "models/test_gpu_packed.py": {
        "test_tiles_give_the_logits_of_what_they_hold": "tests/pallas_kernels/gpu/test_packed.py",
    },
    "models/test_mla.py": {
        "test_outputs_do_not_depend_on_the_degree": "tests/models/test_tensor_parallel.py",
    },
    "models/test_moe.py": {
        "test_sharded_layer_is_the_dense_mixture": "tests/models/test_tensor_parallel.py",
    },
    "models/test_tensor_parallel.py": {
        "test_quantized_weights_are_the_same_on_any_number_of_devices": "test_logits_are_the_goldens",
    },
    "models/test_quantized_checkpoints.py": {
        "test_over_several_devices": "tests/models/test_tensor_parallel.py",
    },
    "pallas_kernels/test_reference.py": {
        "test_pages_update_in_place_when_donated[prefill]": "decode",
    },
    "quantization/test_encoders.py": {
        "test_inputs_that_were_never_used_are_not_lost": "its other tests",
    },
    "quantization/test_sharded.py": {
        "test_products_over_several_devices": "tests/models/test_tensor_parallel.py",
    },
    "requests/test_structured_outputs.py": {
        "test_an_engine_follows_the_longest_chains": "the refused chains after it",
    },
    "research/test_captured_keys.py": {
        "test_they_are_what_attention_shows": "test_keys_and_values_are_as_transformers_holds_them",
    },
    "research/test_captures.py": {
        "test_the_stream_is_the_sum_of_what_is_added_to_it": "test_every_point_of_a_prompt_is_as_transformers_has_it",
        "test_steps_without_captures_are_those_of_an_engine_that_knows_none": "the same test of patches",
    },
    "research/test_logits_processors.py": {
        "test_several_tokens_a_step_and_drafts": "the same test of patches",
        "test_another_engines_functions_are_not_taken_for_these": "tests/engine/core/test_saved.py",
        "test_requests_without_run_what_they_run_in_an_engine_without": "the same test of patches",
    },
    "research/test_new_weights.py": {
        "test_two_devices_exchange_them_as_one": "tests/models/test_tensor_parallel.py",
    },
    "research/test_patching.py": {
        "test_captures_show_the_patch_and_what_comes_of_it": "test_a_patched_request_is_as_transformers_has_it",
        "test_in_a_process_of_its_own": "the same test of captures",
    },
    "research/test_tensor_parallel.py": {
        "test_two_devices_show_what_one_shows": "tests/models/test_tensor_parallel.py",
    },
    "serving/test_hostile.py": {
        "test_large_bodies_stop_nobodys_stream": "tests/serving/http/test_body_process.py",
    },
    "serving/test_scenarios.py": {
        "test_gemma_completes_by_grammar_and_embeds": "its other scenarios",
    },
    "serving/test_stress.py": {
        "test_mixed_requests_leave_nothing_behind": "test_a_hundred_tiny_requests_go_right_and_leave_nothing",
    },
    "test_adapted_bits.py": {
        "test_a_cached_prefix_changes_no_bit": "tests/cpu_kernels/test_low_rank.py",
        "test_neighbours_with_adapters_change_no_bit": "tests/cpu_kernels/test_low_rank.py",
    },
    "test_adapters.py": {
        "test_arrays_of_a_notebook_are_an_adapter": "test_an_adapter_gives_what_the_merged_model_gives",
        "test_adapters_of_other_families": "its tests of Llama, Qwen2 and Phi-3",
        "test_under_tensor_parallelism_adapters_add_the_same": "tests/models/test_tensor_parallel.py",
    },
    "test_disaggregated.py": {
        "test_a_draft_models_pages_come_along": "test_other_models",
    },
    "test_docs.py": {
        "test_tables_are_those_of_the_code[sizes]": "the other tables",
    },
    "test_draft_models.py": {
        "test_two_devices_share_the_draft_model_as_well": "tests/test_draft_models.py, on one",
        "test_a_draft_model_runs_prompts_beside_the_model[gemma3_linear_rope-gpt2]": "deepseek_v3-llama_gqa",
        "test_requests_with_adapters_and_steered_ones_have_drafts_of_a_model_without": "tests/test_drafts.py",
        "test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts": "the same test in tests/test_drafts.py",
    },
    "test_drafts_on_states.py": {
        "test_other_sources_of_drafts": "tests/test_drafts.py",
        "test_a_draft_model_of_attention_alone_drafts_for_one_with_states": "tests/test_draft_models.py",
    },
    "test_eagle3.py": {
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": "the same test of a draft model",
        "test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts": "tests/test_drafts.py",
        "test_at_the_default_dtype_too_no_bit_of_an_answer_changes": "the same test of MTP, in tests/test_mtp.py",
    },
    "test_examples.py": {
        "test_notebook_of_activation_probes": "test_notebook",
        "test_notebook_of_grpo": "test_notebook",
        "test_notebook_of_log_probabilities": "test_notebook",
        "test_notebook_of_quantization": "test_notebook",
        "test_notebook_of_sampling": "test_notebook",
        "test_notebook_of_scoring": "test_notebook",
        "test_notebook_of_steering": "test_notebook",
        "test_notebook_of_the_logit_lens": "test_notebook",
    },
    "test_gpu_benchmark.py": {
        "test_steps_are_measured_and_kept_with_stand_ins_for_what_is_missing": "its other tests",
    },
    "test_guesses.py": {
        "test_a_model_drafts_for_some_and_the_text_for_those_with_a_grammar": "tests/test_draft_models.py",
    },
    "test_jax_settings.py": {
        "test_a_program_that_has_told_jax_otherwise_gets_the_same_tokens": "its other tests",
    },
    "test_mtp.py": {
        "test_answers_are_those_without_drafts_whatever_a_request_asks_for": "the same test of a draft model",
        "test_at_the_default_dtype_too_no_bit_of_an_answer_changes": "tests/test_same_answer.py, by n-grams",
        "test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts": "tests/test_drafts_on_states.py",
    },
    "test_offload.py": {
        "test_a_draft_models_pages_come_along": "test_a_prompt_is_found_again_in_host_memory",
    },
    "test_offload_states.py": {
        "test_in_other_engines": "tests/engine/core/test_scheduler.py, over a simulated device",
    },
    "test_quantized_pages.py": {
        "test_a_server_says_what_the_library_does": "its other tests",
    },
    "test_same_answer.py": {
        "test_drafts_change_no_bit_of_layers_with_a_state": "tests/test_drafts_on_states.py, at float32",
        "test_norms_and_factors_in_other_places": "tests/cpu_kernels/test_same_bits.py",
    },
    "test_saved_start.py": {
        "test_a_process_beside_the_engine_compiles_what_nobody_waits_for": "its second start",
        "test_an_engine_compiles_itself_where_that_process_fails": "its second start",
        "test_executables_that_are_made_ahead_start_an_engine_that_keeps_nothing": "its second start",
        "test_the_second_start_compiles_nothing[off-1]": "auto-1",
        "test_the_second_start_compiles_nothing[off-2]": "auto-1",
    },
    "test_states.py": {
        "test_choices_share_the_state_of_their_prompt": "test_choices_of_a_prompt_go_on_from_one_state, with drafts",
        "test_many_together_give_what_each_gives_alone[qwen3_5-max_num_batched_tokens]": "lfm2",
        "test_many_together_give_what_each_gives_alone[qwen3_5-pages]": "lfm2",
    },
    "test_tensor_parallel.py": {
        "test_three_devices_give_the_golden_tokens": "tests/models/test_tensor_parallel.py",
    },
    "test_trained_adapters.py": {
        "test_a_tiny_model_learns_a_text_and_another_one_another": "tests/research/test_model.py",
    },
    "weights/test_gguf_file.py": {
        "test_every_tensor_of_gemma3_is_finite_and_of_its_shape": "test_smollm2_reads_as_gguf_reads_it",
    },
}
"""Tests, and cases of tests, that are left out, with what comes nearest to them of what is run: it may see less."""


def mark(items: list[pytest.Item]) -> None:
    """Mark what is left out as `thorough`."""
    found: dict[str, int] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        test, _, case = name.removesuffix("]").partition("[")
        number = found[file + test] = found.get(file + test, -1) + 1
        elsewhere = ELSEWHERE.get(file, {})
        kept = KEPT.get(file, {}).get(test, (case,))
        if test in elsewhere or name in elsewhere or number % EVERY.get(file, {}).get(test, 1) or case not in kept:
            item.add_marker(pytest.mark.thorough)
