"""Tests that take long and whose kind another test sees: `make test-slow` runs them, `make test` their kin.

Each line says what is seen in its place.
"""

from __future__ import annotations

COVERED: dict[str, str] = {
    "tests/test_saved_start.py::test_the_second_start_compiles_nothing[off-1]": "auto-1",
    "tests/test_saved_start.py::test_the_second_start_compiles_nothing[off-2]": "auto-1",
    "tests/models/test_gpu_packed.py::test_tiles_give_the_logits_of_what_they_hold[llama_gqa:q4_0]": "llama_gqa:q4k",
    "tests/models/test_gpu_packed.py::test_tiles_give_the_logits_of_what_they_hold[phi3:q5k]": "phi3:q8_0",
    "tests/models/test_gpu_packed.py::test_tiles_give_the_logits_of_what_they_hold[phi3:q3k]": "phi3:q8_0",
    "tests/models/test_gpu_packed.py::test_tiles_give_the_logits_of_what_they_hold[mixtral:q5_0]": "mixtral:q4k",
    "tests/models/test_gpu_packed.py::test_tiles_give_the_logits_of_what_they_hold[mixtral:int4]": "mixtral:q4k",
    "tests/models/test_gpu_checkpoints.py::test_a_packed_checkpoint_gives_the_logits_of_its_numbers[llama:gptq_sorted_each]":
        "mixtral:gptq_sorted_each",
    "tests/models/test_gpu_checkpoints.py::test_a_packed_checkpoint_gives_the_logits_of_its_numbers[phi3:gptq_sorted]":
        "llama:gptq_sorted",
    "tests/models/test_gpu_checkpoints.py::test_bfloat16_is_as_close_as_in_plain_xla[llama:fp8_blocks]":
        "deepseek_v3:fp8_blocks",
    "tests/models/test_gpu_checkpoints.py::test_rounded_inputs_give_the_logits_of_plain_xla[llama:compressed_w8a8]":
        "mixtral:compressed_w8a8",
    "tests/test_draft_models.py::test_answers_are_those_without_drafts_whatever_a_request_asks_for[gemma3_linear_rope-gpt2]":
        "deepseek_v3-llama_gqa",
    "tests/test_draft_models.py::test_a_draft_model_runs_prompts_beside_the_model[gemma3_linear_rope-gpt2]":
        "deepseek_v3-llama_gqa",
    "tests/test_states.py::test_choices_share_the_state_of_their_prompt[mamba2]": "lfm2 and falcon_h1",
    "tests/test_states.py::test_many_together_give_what_each_gives_alone[qwen3_5-max_num_batched_tokens]": "lfm2",
    "tests/test_states.py::test_many_together_give_what_each_gives_alone[qwen3_5-pages]": "lfm2",
    "tests/engine/device/test_device.py::test_a_device_that_is_sent_the_same_messages_holds_the_same[more1-kinds1]":
        "those before and after it; tests/test_two_processes.py",
    "tests/test_two_processes.py::test_a_process_that_fails_ends_the_group_with_a_line[raise]": "its other faults",
    "tests/test_tensor_parallel.py::test_three_devices_give_the_golden_tokens": "tests/models/test_tensor_parallel.py",
    "tests/cpu_kernels/test_build.py::test_a_library_of_few_sets_chooses_among_them":
        "test_some_instruction_sets_are_compiled_by_themselves",
}  # fmt: skip
