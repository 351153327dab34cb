"""Decode of a large model's shape with random 4-bit weights, beside what the memory gives: the two take turns.

Every step reads all weights once, from memory: no cache holds them, nor a part worth naming of as many bytes that are
read for comparison, once before and once after each decode. Needs no files of a model, but memory for twice its
weights.

    python benchmarks/large.py [--streams 1 2 3 4] [--rounds 7] [--isq q4_0]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from machine import describe_machine

from jaxllm import LLM, SamplingParams
from jaxllm.cli.bench.measuring import offline_llm, random_prompts
from jaxllm.config import EngineConfig
from jaxllm.engine.start.schemes import compare_schemes
from jaxllm.machine import physical_cores

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
}  # fmt: skip
PROMPT = 16
TOKENS = 17


class Memory:
    """Bytes that every core reads its part of, by what NumPy has that reads fastest."""

    def __init__(self, nbytes: int) -> None:
        self._parts = np.array_split(np.ones(nbytes // 4, np.float32), physical_cores())
        self._pool = ThreadPoolExecutor(len(self._parts))

    def read_seconds(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda part: np.dot(part, part), self._parts))
        return time.perf_counter() - start


def decode_seconds(llm: LLM, streams: int, source: random.Random) -> float:
    """Seconds a token takes while `streams` sequences decode together; their prompts are one step."""
    prompts = random_prompts(streams, PROMPT, llm.info.vocab_size, source)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    times = [output.metrics for output in outputs]
    return (max(t.finished_time for t in times) - max(t.first_token_time for t in times)) / (TOKENS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isq", default="q4_0")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_1_8B), encoding="utf-8")
        config = EngineConfig(
            model=folder, load_format="dummy", isq=given.isq, skip_tokenizer_init=True, engine_process=False,
            max_model_len=256, max_num_seqs=max(given.streams), max_num_batched_tokens=256,
        )  # fmt: skip
        # The bandwidth does not matter for what is taken of it.
        (weights,) = (s.bytes_a_token for s in compare_schemes(config, 1e9) if s.name == given.isq)
        assert weights is not None
        memory, source = Memory(int(weights)), random.Random(0)
        rounds: dict[int, list[tuple[float, float]]] = {streams: [] for streams in given.streams}
        with offline_llm(config, PROMPT, TOKENS) as llm:
            for streams in given.streams:
                decode_seconds(llm, streams, source)
            for _ in range(given.rounds):
                before = memory.read_seconds()
                for streams in given.streams:
                    took, after = decode_seconds(llm, streams, source), memory.read_seconds()
                    rounds[streams].append((took, (before + after) / 2))
                    before = after
    print(f"{describe_machine()}\n{weights / 1e9:.2f} GB of {given.isq} a step; medians of {given.rounds} rounds")
    print("| streams | tok/s | GB/s of weights | memory gives GB/s | share |\n|---:|---:|---:|---:|---:|")
    for streams, pairs in rounds.items():
        seconds, reading = (statistics.median(times) for times in zip(*pairs, strict=True))
        share = statistics.median(read / took for took, read in pairs)
        print(
            f"| {streams} | {streams / seconds:.2f} | {weights / seconds / 1e9:.1f} | {weights / reading / 1e9:.1f} "
            f"| {share:.0%} |"
        )


if __name__ == "__main__":
    main()
