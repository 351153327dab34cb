"""What a prompt costs whose pages have lost their place: computed anew, or found in host memory or on disk.

Prompts that fill the devices' pages one by one are asked again and again, one token each, with nothing behind the
devices, with host memory behind them, and by a fresh engine that has the first one's files.

    python benchmarks/offload.py [--model NAME] [--tokens 2000] [--prompts 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.start.blueprint import plan_engine

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def seconds_of(llm: LLM, prompts: list[list[int]], cached: bool) -> list[float]:
    """Of each prompt to its first token; all of them are found, or none is."""
    found = []
    for prompt in prompts:
        begin = time.perf_counter()
        (output,) = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
        found.append(time.perf_counter() - begin)
        assert (output.num_cached_tokens > 0.9 * len(prompt)) == cached, output.num_cached_tokens
    return found


def start(model: str, **fields: Any) -> LLM:
    llm = LLM(model, **fields)
    while llm.stats().compiles_pending:
        time.sleep(0.2)
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    plan = plan_engine(EngineConfig(model=given.model))
    room = int(1.5 * given.tokens) * plan.kv_bytes_per_token
    fields = {"max_model_len": given.tokens + 32, "max_num_seqs": 2, "kv_cache_memory": str(room)}
    prompts = np.random.default_rng(0).integers(3, 30_000, (given.prompts, given.tokens)).tolist()
    found: dict[str, list[float]] = {}
    with start(given.model, **fields) as llm:
        seconds_of(llm, prompts[:2], cached=False)
        found["computed anew"] = seconds_of(llm, prompts, cached=False)
    with tempfile.TemporaryDirectory() as folder:
        fields |= {"kv_offload_memory": "4GiB", "kv_offload_dir": folder}
        with start(given.model, **fields) as llm:
            seconds_of(llm, prompts, cached=False)
            found["found in host memory"] = seconds_of(llm, prompts, cached=True)
            pages = given.prompts * (given.tokens // plan.page_size)
            while llm.stats().num_disk_pages < pages:
                time.sleep(0.2)
        with start(given.model, **fields) as llm:
            found["found on disk, by a new engine"] = seconds_of(llm, prompts, cached=True)
    machine = describe_machine()
    size = given.tokens * plan.kv_bytes_per_token / 2**20
    print(f"{given.model}, {given.prompts} prompts of {given.tokens} tokens ({size:.0f} MiB of pages each), ", end="")
    print(f"{machine['cores']} cores {machine['processor']}")
    first = statistics.median(found["computed anew"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{name:32} {median:8.3f} s to the first token   {median / first:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, **vars(given), "seconds": found}, default=str))


if __name__ == "__main__":
    main()
