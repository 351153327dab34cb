"""jaxllm under the common workload."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import workload

from jaxllm import LLM, SamplingParams


def start(arguments: argparse.Namespace) -> workload.Generate:
    cache = {"compile_cache_dir": arguments.compile_cache} if arguments.compile_cache else {}
    llm = LLM(
        arguments.model,
        **cache,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        enable_prefix_caching=arguments.cached,
        skip_tokenizer_init=True,
    )
    workload.report_ready("jaxllm")  # it answers while it compiles further sizes
    while llm.stats().compiles_pending and not arguments.once:
        time.sleep(0.1)

    def generate(prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [len(output.outputs[0].token_ids) for output in llm.generate(requests, params, use_tqdm=False)]

    return generate


def distributions(arguments: argparse.Namespace) -> workload.Distributions:
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        dequantize=arguments.expanded,
        max_model_len=arguments.max_model_len,
        max_num_seqs=1,
        max_logprobs=-1,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)

    def after(ids: list[int], first: int) -> Iterator[list[float]]:
        for end in range(first, len(ids)):
            [output] = llm.generate([{"prompt_token_ids": ids[:end]}], params, use_tqdm=False)
            [found] = output.outputs[0].logprobs
            yield [found[token].logprob for token in range(len(found))]

    return after


if __name__ == "__main__":
    workload.run("jaxllm", start, distributions)
