"""Tests of few dear cases, of which `make test` runs those named here; `make test-all` runs all of them.

As in `tests.support.sampled`, the cases of a test are of one kind, and nothing is left out because it fails.
"""

from __future__ import annotations

FAMILIES = (
    "llama_gqa",
    "llama4",
    "qwen3_5_moe",
    "gemma4",
    "deepseek_v2_lite",
    "lfm2_moe",
    "granite4",
)
"""Whose logits are compared with those of transformers by whole prompts; others are by single tokens."""

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "cli/convert/test_conversion.py": {
        "test_packed_weights_are_saved_as_they_are": ("llama:gptq_128", "mixtral:mxfp4"),
    },
    "cli/convert/test_merging.py": {
        "test_the_merged_model_says_what_peft_says": ("plain", "tied_head"),
    },
    "engine/core/test_compiled_step.py": {
        "test_donated_pages_are_not_copied": ("bfloat16-decode", "bfloat16-sampled", "bfloat16-backbone"),
    },
    "engine/core/test_device.py": {
        "test_a_device_that_is_sent_the_same_messages_holds_the_same": ("more0-kinds0",),
    },
    "engine/doors/test_sleep.py": {
        "test_at_level_1_the_files_of_the_weights_are_not_read_again": ("1",),
        "test_it_answers_the_same_after_a_sleep": ("1-1",),
        "test_weights_of_another_plan_are_refused_and_then_forgotten": ("1",),
    },
    "engine/features/grammar/test_thinking_budget.py": {
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
        "test_the_marker_comes_when_the_budget_is_spent": ("drafts-0-several tokens",),
        "test_what_cannot_be_forced_fails_alone": ("four steps a dispatch",),
    },
    "test_host_experts.py": {
        "test_however_many_are_away": ("gpt_oss",),
        "test_over_several_devices": ("shared by two batches on two devices each",),
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
    "models/test_gpu_packed.py": {
        "test_parts_of_rows_are_added_up_by_who_reads_them": ("llama_gqa:q4_0",),
    },
    "models/test_eagle3.py": {
        "test_states_are_as_defined": ("speculators",),
    },
    "models/test_mla.py": {
        "test_outputs_are_the_definition_s": ("q_lora-reference",),
    },
    "models/test_mtp.py": {
        "test_what_the_head_reads_is_as_defined": ("glm4_moe",),
    },
    "models/test_packed.py": {
        "test_a_packed_gguf_gives_the_logits_of_its_expansion": ("llama_gqa", "qwen2_moe"),
    },
    "models/test_parity.py": {
        "test_a_prompt_in_one_chunk": FAMILIES,
        "test_a_prompt_in_ragged_chunks": tuple(f"{name}-(7, 9, 16, 33, 48, 63)" for name in FAMILIES),
        "test_greedy_decoding_after_the_prompt": ("llama_gqa", "qwen3_5_moe", "lfm2_moe"),
        "test_prompts_beside_each_other_at_different_places": FAMILIES,
        "test_token_by_token": (
            "llama_gqa",
            "phi3_longrope_short",
            "gemma3_softcap",
            "deepseek_v3",
            "nemotron_h",
        ),
    },
    "models/test_quantized_checkpoints.py": {
        "test_a_packed_checkpoint_gives_the_logits_of_its_numbers": (
            "llama:gptq_sorted",
            "llama:bitsandbytes_int8",
            "mixtral:gptq_sorted_each",
        ),
    },
    "models/test_tensor_parallel.py": {
        "test_logits_are_the_goldens": ("layouts",),
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
        "test_few_rows": ("Q4_0", "Q4_K", "8 bits"),
        "test_many_rows": ("8 bits, symmetric-40",),
    },
    "quantization/test_encoders.py": {
        "test_errors_are_small_where_an_importance_matrix_says": ("Q6_K", "Q5_1"),
        "test_k_quants_are_as_good_as_llama_cpps": ("normal-Q2_K", "normal-Q5_K"),
        "test_others_are_no_worse_than_ggufs": ("normal-Q4_0", "normal-Q5_1"),
    },
    "research/test_captures.py": {
        "test_completions_are_captured_beside_requests_that_are_not": ("llama_gqa",),
        "test_only_the_positions_that_are_asked_for": ("llama_gqa-last", "lfm2-positions2"),
    },
    "research/test_logits_processors.py": {
        "test_tokens_are_those_that_numpy_chooses": ("llama_gqa",),
    },
    "research/test_model.py": {
        "test_the_derivative_is_what_torch_finds": ("lfm2_moe",),
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
        "test_a_tensor_that_the_model_lacks_is_named": ("llama_gqa",),
        "test_an_adapter_that_cannot_be_used_fails_its_request_alone": ("llama_gqa-rank", "llama_gqa-nowhere"),
        "test_arrays_that_do_not_fit_are_refused_when_they_are_added": ("phi3",),
        "test_more_adapters_than_places_take_turns": ("llama_gqa",),
        "test_prompts_are_scored_with_adapters": ("llama_gqa",),
        "test_requests_with_other_adapters_and_without_share_steps": ("llama_gqa",),
        "test_several_adapters_add_up_each_with_its_scale": ("llama_gqa",),
        "test_wrong_uses_are_refused_before_anything_runs": ("llama_gqa",),
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
    "test_eagle3.py": {
        "test_drafts_are_those_of_the_definition": ("llama_gqa-differently0",),
    },
    "test_examples.py": {
        "test_what_the_examples_ask_is_known_by_a_margin": ("auto",),
    },
    "test_goldens.py": {
        "test_greedy_tokens": ("smollm2-135m",),
        "test_prompt_logprobs": ("smollm2-135m",),
        "test_text_is_tokenized_as_the_reference_tokenizes_it": ("smollm2-135m",),
    },
    "test_guesses.py": {
        "test_a_schema_is_followed_whatever_the_draft": ("llama_gqa",),
        "test_an_answer_that_is_known_takes_fewer_steps": ("llama_gqa-json", "llama_gqa-regex"),
        "test_answers_are_those_without_drafts": ("llama_gqa",),
        "test_drafts_go_from_the_reasoning_into_the_schema": ("llama_gqa",),
        "test_with_few_pages_requests_are_preempted_in_the_middle_of_drafts": ("llama_gqa",),
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
        "test_drafts_are_those_of_the_definition": ("deepseek_v3-differently0",),
    },
    "test_disaggregated_states.py": {
        "test_other_models": ("mamba2",),
    },
    "test_offload.py": {
        "test_a_prompt_is_found_again_in_host_memory": ("deepseek_v3",),
        "test_in_other_engines": ("{'kv_cache_dtype': 'int8'}",),
    },
    "test_offload_states.py": {
        "test_a_prompt_is_found_again_in_host_memory": ("qwen3_5",),
        "test_another_process_finds_what_an_idle_one_has_saved": ("qwen3_5",),
        "test_prompts_at_random_with_tiny_budgets": ("2",),
        "test_requests_beside_each_other_and_preempted": ("lfm2",),
    },
    "test_data_parallel.py": {
        "test_batches_say_what_one_batch_says": ("deepseek_v3-(2, 2)",),
    },
    "test_peft_options.py": {
        "test_a_request_gets_what_peft_says": ("patterns", "gpt2_dora"),
    },
    "test_quantized_pages.py": {
        "test_the_cpu_kernels_score_as_plain_xla_does": ("llama_gqa-fp8", "deepseek_v3-int8"),
        "test_tokens_are_the_same_however_a_request_is_run": ("llama_gqa-int8",),
    },
    "test_same_answer.py": {
        "test_layers_with_a_state": ("lfm2",),
    },
    "test_several_processes.py": {
        "test_a_process_that_fails_ends_the_group_with_a_line": (
            "kill-{'tensor_parallel_size': 2}",
            "stop-{'pipeline_parallel_size': 2}",
        ),
        "test_stages_and_batches_in_several_processes_say_what_one_process_says": (
            "a stage each",
            "half a stage each",
            "a batch each",
        ),
    },
    "test_stages.py": {
        "test_stages_say_what_one_device_says": ("llama_gqa-(2, 1)", "deepseek_v3-(3, 1)"),
    },
    "test_states.py": {
        "test_a_prefix_hit_continues_as_transformers_does": ("falcon_h1",),
        "test_every_beginning_of_a_prompt_gives_the_token_that_transformers_gives": ("falcon_h1",),
        "test_many_together_give_what_each_gives_alone": ("lfm2-decode_steps",),
        "test_of_a_chats_first_turn_hardly_anything_is_computed_again": ("lfm2",),
    },
    "text/test_llama_cpp_tokens.py": {
        "test_tokens_are_those_of_llama_cpp": ("smollm2-135m",),
    },
}
"""Of the cases of a test, those that are run."""
