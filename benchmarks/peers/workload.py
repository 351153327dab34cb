"""The work every engine does, and the one way it is timed.

Standard library only: it runs in each peer's own environment.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], Sequence[int]]
"""(prompts as token ids, tokens to generate for each) -> how many tokens each prompt got, when all are finished."""

Distributions = Callable[[list[int], int], Iterable[Sequence[float]]]
"""(token ids, first) -> the vocabulary's log-probabilities after ids[:first], then after ids[:first + 1], and so on."""

SMALLEST_ID, LARGEST_ID = 1_000, 40_000  # ordinary tokens of the vocabulary


@dataclass(frozen=True)
class Work:
    """`streams` prompts of `prompt_tokens` at once, and `new_tokens` for each; written 16x128+128."""

    streams: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Work:
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not STREAMSxPROMPT+NEW, like 16x128+128")
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.streams}x{self.prompt_tokens}+{self.new_tokens}"


def run(
    engine: str,
    start: Callable[[argparse.Namespace], Generate],
    distributions: Callable[..., Distributions] | None = None,
) -> None:
    """Start an engine, do each piece of work, and print one JSON line for it.

    With --text nothing is timed: what `distributions` says of those tokens is written to a file.

    With --once nothing is warmed up or waited for: a line says that a work is done. One line says when the engine is
    ready, always.

    Prefill is timed by generating one token for every prompt; decode by what generating all of them takes longer:
    `prefill_tok_s = streams x prompt_tokens / t_1`, `decode_tok_s = streams x (new_tokens - 1) / (t_new_tokens - t_1)`.
    With --cached the engine keeps a prompt, so that a long one is computed once: decode is what all tokens take longer
    than two, after that.
    """
    arguments = parse_arguments()
    if arguments.text is not None:
        assert distributions is not None, f"{engine} gives no distributions"
        write_distributions(distributions(arguments), arguments)
        return
    generate = start(arguments)
    report_ready(engine)
    if arguments.ready:
        return
    if arguments.once:
        for work in arguments.work:
            timed(generate, random_prompts(work), work.new_tokens)
            print(json.dumps({"engine": engine, "what": str(work)}), flush=True)
        return
    warm_up = min(arguments.work, key=lambda work: work.streams * (work.prompt_tokens + work.new_tokens))
    generate(random_prompts(replace(warm_up, prompt_tokens=warm_up.prompt_tokens + 1)), warm_up.new_tokens)
    for work in arguments.work:
        prompts, few = random_prompts(work), 2 if arguments.cached else 1
        if not arguments.cached:
            timed(generate, prompts, 2)
        first = timed(generate, prompts, 1)
        if work.new_tokens == 1:
            report(engine, work, first)
        else:
            start_of_it = timed(generate, prompts, few) if arguments.cached else first
            rest = timed(generate, prompts, work.new_tokens) - start_of_it
            report(engine, work, first, decode_tok_s=work.streams * (work.new_tokens - few) / rest)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file or checkpoint directory, as the engine takes it")
    parser.add_argument("--dtype", default="bfloat16", help="compute type of the engines that have the choice")
    parser.add_argument("--work", type=Work.parse, nargs="+", default=[], metavar="STREAMSxPROMPT+NEW")
    parser.add_argument("--once", action="store_true", help="do the work as soon as the engine is ready, and end")
    parser.add_argument("--ready", action="store_true", help="end as soon as the engine is ready")
    parser.add_argument("--cached", action="store_true", help="keep prompts, and compute each once")
    parser.add_argument("--compile-cache", help="where jaxllm keeps what it compiles (default: its own place)")
    parser.add_argument(
        "--text", type=Path, help="JSON: ids of tokens, the first that is predicted, and the vocabulary"
    )
    parser.add_argument("--output", type=Path, help="with --text: where the log-probabilities go, as float32")
    parser.add_argument("--expanded", action="store_true", help="jaxllm expands the weights to --dtype")
    arguments = parser.parse_args()
    if not arguments.work and arguments.text is None:
        parser.error("say what to do: --work or --text")
    if arguments.text is not None:
        arguments.work = [Work(1, len(json.loads(arguments.text.read_text())["ids"]), 1)]
    arguments.max_num_seqs = max(work.streams for work in arguments.work)
    arguments.max_model_len = 64 + max(work.prompt_tokens + work.new_tokens for work in arguments.work)
    return arguments


def write_distributions(distributions: Distributions, arguments: argparse.Namespace) -> None:
    """One row of float32 after another."""
    text: dict[str, Any] = json.loads(arguments.text.read_text())
    with arguments.output.open("wb") as file:
        for row in distributions(text["ids"], text["first"]):
            if len(row) != text["vocabulary"]:
                raise SystemExit(f"{len(row)} log-probabilities of a vocabulary of {text['vocabulary']}")
            array("f", row).tofile(file)


def random_prompts(work: Work) -> list[list[int]]:
    """Different prompts for every stream; the same in every engine."""
    rng = random.Random(f"{work.streams}x{work.prompt_tokens}")
    return [[rng.randrange(SMALLEST_ID, LARGEST_ID) for _ in range(work.prompt_tokens)] for _ in range(work.streams)]


def timed(generate: Generate, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds it takes; refuses an engine that stopped early."""
    begin = time.perf_counter()
    generated = generate(prompts, new_tokens)
    seconds = time.perf_counter() - begin
    if list(generated) != [new_tokens] * len(prompts):
        raise SystemExit(f"asked for {new_tokens} tokens from each of {len(prompts)} prompts, got {list(generated)}")
    return seconds


def report_ready(engine: str) -> None:
    print(json.dumps({"engine": engine, "what": "ready"}), flush=True)


def report(engine: str, work: Work, first_token_s: float, decode_tok_s: float | None = None) -> None:
    """`first_token_s`: until every stream has its first token."""
    prefill_tok_s = work.streams * work.prompt_tokens / first_token_s
    cell = {"engine": engine, "first_token_s": round(first_token_s, 4), "prefill_tok_s": round(prefill_tok_s, 2)}
    if decode_tok_s is not None:
        cell["decode_tok_s"] = round(decode_tok_s, 2)
    print(json.dumps(cell | asdict(work)), flush=True)
