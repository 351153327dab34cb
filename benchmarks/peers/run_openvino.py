"""OpenVINO GenAI's continuous batching under the common workload. The model is a GGUF file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai
import workload


def start(arguments: argparse.Namespace) -> workload.Generate:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = arguments.cached
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.cache_size = 2  # GiB
    pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU")

    def generate(prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([ids], np.int64)) for ids in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        return [len(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    workload.run("openvino-genai", start)
