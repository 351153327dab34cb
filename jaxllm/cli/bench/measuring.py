"""What the benchmarks share: flags, the load of random prompts, statistics, and the report of a result."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from jaxllm.cli.terminal import print_table
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


LOAD_GROUP = Group("Load", sort_key=0)


def _writable(_: type, file: Path | None) -> None:
    """Refuse at the door a result file that could not be written after minutes of measuring."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ValueError("it cannot be written to")


Count = Annotated[int, Parameter(group=LOAD_GROUP, validator=Number(gte=1))]


def counts(*names: str) -> Parameter:
    return Parameter(name=names, group=LOAD_GROUP, consume_multiple=True, negative=(), validator=Number(gte=1))


Rate = Annotated[float, Parameter(group=LOAD_GROUP, validator=Number(gt=0))]
JsonFile = Annotated[Path | None, Parameter(name="--json", group=LOAD_GROUP, validator=_writable)]


_FIRST_ORDINARY_TOKEN = 1000
"""Special and byte tokens come first in every vocabulary; random prompts stay above them where there is room."""


def random_prompts(count: int, length: int, vocab_size: int, source: random.Random) -> list[list[int]]:
    """`count` prompts of `length` uniformly random token ids; alike in length only, so no prefix is ever shared."""
    first = min(_FIRST_ORDINARY_TOKEN, vocab_size // 2)
    return [[source.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


def send_times(count: int, rate: float, source: random.Random) -> list[float]:
    """When each request is sent, in seconds: a Poisson process of `rate` a second; inf is all at once."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.expovariate(rate) if rate != float("inf") else 0.0
    return times


async def run_load(
    send: Callable[[list[int]], Awaitable[Trace]], prompts: list[list[int]], times: list[float], concurrency: int | None
) -> tuple[list[Trace], float]:
    """Send each prompt at its time, at most `concurrency` in flight; returns the traces and the seconds of them all."""
    begin = time.perf_counter()
    gate = asyncio.Semaphore(concurrency or len(prompts))

    async def one(prompt: list[int], at: float) -> Trace:
        await asyncio.sleep(begin + at - time.perf_counter())
        async with gate:
            return await send(prompt)

    traces = await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, times, strict=True)))
    return traces, time.perf_counter() - begin


def timed_generate(llm: LLM, count: int, input_len: int, output_len: int, source: random.Random) -> float:
    """Seconds to generate exactly `output_len` tokens for `count` random prompts together, in process."""
    prompts = random_prompts(count, input_len, llm.info.vocab_size, source)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begin


def say(doing: str) -> None:
    """What a measurement is at, for whoever waits for it."""
    print(doing, file=sys.stderr, flush=True)


def wait_until_compiled(llm: LLM) -> None:
    said = 0.0
    while pending := llm.stats().compiles_pending:
        if time.monotonic() > said + 10:
            said = time.monotonic()
            say(f"compiling {pending} more executables")
        time.sleep(0.1)


@contextmanager
def offline_llm(config: EngineConfig, input_len: int, output_len: int) -> Iterator[LLM]:
    """An LLM with every planned bucket compiled. Raises ConfigError where such requests do not fit its context."""
    from jaxllm.llm import LLM

    logging.basicConfig(format="%(message)s")
    logging.getLogger("jaxllm").setLevel(logging.INFO)
    llm = LLM(**config.model_dump(exclude_unset=True))
    try:
        length, context = input_len + output_len, llm.info.max_model_len
        if length > context:
            raise ConfigError(
                f"--input-len {input_len} and --output-len {output_len} make {length} tokens; "
                f"the context holds {context}"
            )
        wait_until_compiled(llm)
        yield llm
    finally:
        llm.shutdown()


@dataclass
class Trace:
    """One request as its client saw it; times are seconds on one clock."""

    start: float
    prompt_tokens: int
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer arrived."""
    output_tokens: int = 0
    error: str | None = None


def spread(values: Sequence[float]) -> dict[str, float]:
    """{'mean', 'p50', 'p90', 'p99', 'max'} of `values`; empty where there are none."""
    import numpy as np

    if not values:
        return {}
    ranks = dict(zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)).tolist(), strict=True))
    return {"mean": sum(values) / len(values), **ranks, "max": max(values)}


def summarize(traces: Sequence[Trace], duration: float) -> dict[str, object]:
    """Rates over `duration` seconds and the spread of each latency in milliseconds, of the finished requests."""
    finished = [trace for trace in traces if trace.error is None and trace.arrivals]
    prompt_tokens = sum(trace.prompt_tokens for trace in finished)
    output_tokens = sum(trace.output_tokens for trace in finished)
    times_per_token = [
        (trace.arrivals[-1] - trace.arrivals[0]) / (trace.output_tokens - 1)
        for trace in finished
        if trace.output_tokens > 1
    ]
    return {
        "duration_s": duration,
        "completed": len(finished),
        "failed": len(traces) - len(finished),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(finished) / duration,
        "prompt_tokens_per_s": prompt_tokens / duration,
        "output_tokens_per_s": output_tokens / duration,
        "ttft_ms": _milliseconds([trace.arrivals[0] - trace.start for trace in finished]),
        "tpot_ms": _milliseconds(times_per_token),
        "itl_ms": _milliseconds([later - earlier for trace in finished for earlier, later in pairwise(trace.arrivals)]),
        "e2e_ms": _milliseconds([trace.arrivals[-1] - trace.start for trace in finished]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {name: value * 1000 for name, value in spread(seconds).items()}


MOST_COLUMNS = 5
"""Results beside one another; more are shown one below the other."""


def report(
    name: str, config: EngineConfig, load: Mapping[str, Any], results: Sequence[Mapping[str, Any]], file: Path | None
) -> None:
    """Print one column a result, or one row of many, and write all of it into `file`."""
    flat = [flatten(result) for result in results]
    rows = [[field.replace("_", " "), *(_number(result.get(field)) for result in flat)] for field in flat[0]]
    if wide := len(results) > MOST_COLUMNS:
        rows = [list(row) for row in zip(*rows, strict=True)]
    headings = rows.pop(0) if wide else [""] * (1 + len(results))
    numbers = () if wide else range(1, 1 + len(results))
    print_table(headings, rows, title=f"{name}: {config.model}", numbers=numbers)
    if file is not None:
        document = {
            "benchmark": name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": platform.platform(),
            "versions": {package: version(package) for package in ("jaxllm", "jax", "flax")},
            "config": config.model_dump(mode="json", exclude={"api_key"}),
            "load": dict(load),
            "results": [dict(result) for result in results],
        }
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def flatten(result: Mapping[str, Any]) -> dict[str, Any]:
    """{'ttft_ms': {'p50': 1.0}} -> {'ttft_ms p50': 1.0}."""
    flat: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} {rank}": number for rank, number in value.items()}
        else:
            flat[name] = value
    return flat


def _number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
