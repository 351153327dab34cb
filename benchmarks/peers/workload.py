"""The work every engine does, and the one way it is timed.

Standard library only: it runs in each peer's own environment.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence

Generate = Callable[[list[list[int]], int], Sequence[int]]
"""(prompts as token ids, tokens to generate for each) -> how many tokens each prompt got, when all are finished."""

SMALLEST_ID, LARGEST_ID = 1_000, 40_000  # ordinary tokens of the vocabulary


def run(engine: str, start: Callable[[argparse.Namespace], Generate]) -> None:
    """Start an engine, do the work at each number of streams, and print one JSON line a cell.

    Prefill is timed by generating one token for every prompt; decode by what generating all of them takes longer:
    `prefill_tok_s = streams x prompt_tokens / t_1`, `decode_tok_s = streams x (new_tokens - 1) / (t_new_tokens - t_1)`.
    """
    arguments = parse_arguments()
    generate = start(arguments)
    generate(random_prompts(min(arguments.streams), arguments.prompt_tokens), arguments.new_tokens)
    for streams in arguments.streams:
        prompts = random_prompts(streams, arguments.prompt_tokens)
        timed(generate, prompts, 2)
        first = timed(generate, prompts, 1)
        last = timed(generate, prompts, arguments.new_tokens)
        report(
            engine,
            streams,
            prefill_tok_s=streams * arguments.prompt_tokens / first,
            decode_tok_s=streams * (arguments.new_tokens - 1) / (last - first),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file or checkpoint directory, as the engine takes it")
    parser.add_argument("--dtype", default="bfloat16", help="compute type of the engines that have the choice")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    return parser.parse_args()


def random_prompts(streams: int, tokens: int) -> list[list[int]]:
    """`streams` different prompts of `tokens` ids; the same in every engine."""
    rng = random.Random(streams)
    return [[rng.randrange(SMALLEST_ID, LARGEST_ID) for _ in range(tokens)] for _ in range(streams)]


def timed(generate: Generate, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds it takes; refuses an engine that stopped early."""
    begin = time.perf_counter()
    generated = generate(prompts, new_tokens)
    seconds = time.perf_counter() - begin
    if list(generated) != [new_tokens] * len(prompts):
        raise SystemExit(f"asked for {new_tokens} tokens from each of {len(prompts)} prompts, got {list(generated)}")
    return seconds


def report(engine: str, streams: int, prefill_tok_s: float, decode_tok_s: float) -> None:
    cell = {"engine": engine, "streams": streams, "prefill_tok_s": prefill_tok_s, "decode_tok_s": decode_tok_s}
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in cell.items()}), flush=True)
