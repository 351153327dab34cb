"""Decode of a large model's shape with random 4-bit weights, beside what the memory gives: the two take turns.

Every step reads all weights once, from memory: no cache holds them, nor a part worth naming of as many bytes that are
read for comparison. Needs no files of a model.

    python benchmarks/large.py [--streams 1 2 4] [--rounds 5] [--isq q4_0]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from machine import describe_machine

from jaxllm import LLM, SamplingParams
from jaxllm.cli.bench.load import offline_llm, random_prompts
from jaxllm.config import EngineConfig
from jaxllm.engine.start.schemes import compare_schemes, measure_bandwidth

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
}  # fmt: skip
PROMPT = 16
TOKENS = 33


def decode_seconds(llm: LLM, streams: int, source: random.Random) -> float:
    """Seconds a token takes while `streams` sequences decode together; their prompts are one step."""
    prompts = random_prompts(streams, PROMPT, llm.info.vocab_size, source)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    times = [output.metrics for output in outputs]
    return (max(t.finished_time for t in times) - max(t.first_token_time for t in times)) / (TOKENS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isq", default="q4_0")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_1_8B), encoding="utf-8")
        config = EngineConfig(
            model=folder, load_format="dummy", isq=given.isq, skip_tokenizer_init=True, engine_process=False,
            max_model_len=256, max_num_seqs=max(given.streams), max_num_batched_tokens=256,
        )  # fmt: skip
        (weights,) = (s.bytes_a_token for s in compare_schemes(config, measure_bandwidth()) if s.name == given.isq)
        assert weights is not None
        source = random.Random(0)
        with offline_llm(config, PROMPT, TOKENS) as llm:
            print(
                f"{describe_machine()}\n{weights / 1e9:.2f} GB of {given.isq} a step; medians of {given.rounds} rounds"
            )
            print("| streams | tok/s | GB/s of weights | memory gives GB/s | share |\n|---:|---:|---:|---:|---:|")
            for streams in given.streams:
                decode_seconds(llm, streams, source)
                rounds = [
                    (measure_bandwidth(int(weights)), decode_seconds(llm, streams, source)) for _ in range(given.rounds)
                ]
                seconds = statistics.median(took for _, took in rounds)
                memory = statistics.median(bandwidth for bandwidth, _ in rounds)
                share = statistics.median(weights / took / bandwidth for bandwidth, took in rounds)
                print(
                    f"| {streams} | {streams / seconds:.2f} | {weights / seconds / 1e9:.1f} | {memory / 1e9:.1f} "
                    f"| {share:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
