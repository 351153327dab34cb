"""How the cost of decoding grows: with the number of streams, and with the length of the context.

Draws both into benchmarks/results/growth.md, beside what the memory allows at most: every step reads the weights once,
and every stream's keys and values.

    python benchmarks/growth.py [--model smollm2-135m] [--streams 1 2 4 8 16 32 64] [--contexts 128 512 2048 8000]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from line_chart import line_chart
from machine import describe_machine

from jaxllm import SamplingParams
from jaxllm.cli.bench import measure
from jaxllm.cli.bench.measuring import offline_llm, random_prompts
from jaxllm.config import EngineConfig
from jaxllm.engine.start.schemes import STORED, compare_schemes, measure_bandwidth

PAGE = Path(__file__).parent / "results" / "growth.md"
BEGIN, END = "<!-- benchmarks/growth.py writes from here -->", "<!-- to here -->"
PROMPT = 128
TOKENS = 64


@dataclass(frozen=True)
class Point:
    """Tokens a second of all streams together: measured, and if a step took no longer than reading its memory."""

    at: int
    measured: float
    allowed: float


def run(model: str, streams: Sequence[int], contexts: Sequence[int], rounds: int) -> tuple[list[Point], list[Point]]:
    """Decode by the number of streams, of `PROMPT` tokens each, and that of one stream by its context."""
    longest = max(PROMPT, *contexts)
    config = EngineConfig(model=model, max_model_len=longest + TOKENS, max_num_seqs=max(streams), engine_process=False)
    bandwidth, source = measure_bandwidth(), random.Random(0)
    (weights,) = (s.bytes_a_token for s in compare_schemes(config, bandwidth) if s.name == STORED)
    assert weights is not None
    with offline_llm(config, longest, TOKENS) as llm:
        position = llm.info.kv_cache_memory / (llm.info.num_pages + 1) / llm.info.page_size

        def alone(context: int) -> float:
            """From a request's own times: its prompt may take far longer than its tokens."""
            prompts = random_prompts(rounds, context, llm.info.vocab_size, source)
            params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            outputs = (llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0] for ids in prompts)
            times = [output.metrics for output in outputs]
            return max((TOKENS - 1) / (t.finished_time - t.first_token_time) for t in times)

        def point(at: int, count: int, context: int) -> Point:
            if count == 1:
                found = alone(context)
            else:
                found = measure(llm, count, context, TOKENS, rounds, source)["decode_tokens_per_s"]
            print(f"{count} streams, {context} tokens before them: {found:,.0f} tok/s", flush=True)
            return Point(at, found, count * bandwidth / (weights + count * (context + TOKENS / 2) * position))

        return [point(n, n, PROMPT) for n in streams], [point(n, 1, n) for n in contexts]


def chart(title: str, axis: str, name: str, points: Sequence[Point]) -> Iterator[str]:
    """A picture of what was measured, and the table beside it."""
    xs, ys = [point.at for point in points], [point.measured for point in points]
    picture = line_chart(f"{title}, tokens a second", axis, xs, ys)
    (PAGE.parent / name).write_text(picture, encoding="utf-8")
    yield from (f"![{title}]({name})", "")
    yield from (f"| {axis} | tok/s | memory allows | share |", "|---:|---:|---:|---:|")
    for point in points:
        share = point.measured / point.allowed
        yield f"| {point.at:,} | {point.measured:,.0f} | {point.allowed:,.0f} | {share:.0%} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    by_streams, by_context = run(given.model, given.streams, given.contexts, given.rounds)
    machine = describe_machine()
    on = f"{machine['processor']}, {machine['cores']} cores ({', '.join(machine['vector_units'])}), {machine['date']}"
    lines = [
        BEGIN, "", f"{given.model} on {on}: `python benchmarks/growth.py`", "",
        *chart("Decode, all streams together", f"streams of {PROMPT} tokens", "decode-by-streams.svg", by_streams),
        *chart("Decode of one stream", "tokens of context", "decode-by-context.svg", by_context), END,
    ]  # fmt: skip
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + "\n".join(lines) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
