"""What it costs to look inside: prefill with and without captures and patches, in turns, in one engine.

Each round runs the same prompts plainly, with the residual stream of four layers captured at every token and at the
last one, with keys and values of four, with what their attention adds, and with a patch a prompt; ratios are of
seconds, to the plain run.

    python benchmarks/captures.py [--model NAME] [--prompts 8] [--tokens 256] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from jaxllm import LLM, SamplingParams

LAYERS = 4


def cases(llm: LLM, prompts: list[list[int]]) -> dict[str, Callable[[], Any]]:
    """What is timed, by its name; the plain run first."""
    last = llm.info.num_layers - 1
    layers = sorted({round(last * part / (LAYERS - 1)) for part in range(LAYERS)})
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    patch = {(layers[1], -1): np.zeros(llm.info.hidden_size)}
    cached: dict[str, Any] = {"keys": layers, "values": layers}
    return {
        "plain": lambda: llm.generate(prompts, params, use_tqdm=False),
        f"{len(layers)} layers, all tokens": lambda: llm.capture(prompts, {"residual": layers}, use_tqdm=False),
        f"{len(layers)} layers, last token": lambda: llm.capture(prompts, {"residual": layers}, "last", use_tqdm=False),
        f"keys, values of {len(layers)} layers": lambda: llm.capture(prompts, cached, use_tqdm=False),
        f"attention of {len(layers)} layers": lambda: llm.capture(prompts, {"attention_out": layers}, use_tqdm=False),
        "a patch a prompt": lambda: llm.generate(prompts, params, use_tqdm=False, patch=patch),
    }


def timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with LLM(arguments.model, max_model_len=arguments.tokens + 8, enable_prefix_caching=False) as llm:
        while llm.stats().compiles_pending:
            time.sleep(0.2)
        vocabulary = llm.info.vocab_size
        prompts = [
            [(97 * i + token) % vocabulary for token in range(arguments.tokens)] for i in range(arguments.prompts)
        ]
        runs = cases(llm, prompts)
        for run in runs.values():  # what each needs is compiled now
            run()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                seconds[name].append(timed(run))
    machine, count = describe_machine(), arguments.prompts * arguments.tokens
    print(
        f"{arguments.model}, {arguments.prompts} prompts of {arguments.tokens} tokens, {machine['cores']} cores "
        f"{machine['processor']}"
    )
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["plain"], strict=True))
        print(f"{name:26} {count / statistics.median(found):9,.0f} tok/s   {ratio:.2f} of the time")
    if arguments.json:
        told = {"machine": machine, **vars(arguments), "json": None, "seconds": seconds}
        arguments.json.write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main()
