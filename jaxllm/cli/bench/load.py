"""The load: random prompts, and when each of them is sent."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxllm.cli.bench.stats import Trace
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

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


def fixed_length(output_len: int) -> SamplingParams:
    """Greedy, exactly `output_len` tokens: end-of-sequence does not end it."""
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


async def run_load(
    send: Callable[[list[int]], Awaitable[Trace]],
    prompts: Sequence[list[int]],
    times: Sequence[float],
    concurrency: int | None,
) -> tuple[list[Trace], float]:
    """Send each prompt at its time, at most `concurrency` in flight; returns the traces and the seconds it all took."""
    begin = time.perf_counter()
    gate = asyncio.Semaphore(concurrency or len(prompts))

    async def one(prompt: list[int], at: float) -> Trace:
        await asyncio.sleep(begin + at - time.perf_counter())
        async with gate:
            return await send(prompt)

    traces = await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, times, strict=True)))
    return traces, time.perf_counter() - begin


def timed_generate(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> float:
    """Seconds to generate `output_len` tokens for all prompts together, in process."""
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], fixed_length(output_len), use_tqdm=False)
    return time.perf_counter() - begin


@contextmanager
def offline_llm(config: EngineConfig, input_len: int, output_len: int) -> Iterator[LLM]:
    """An LLM with every planned bucket compiled, so that no compile runs beside a measurement; shut down at the end.

    Raises:
        ConfigError: requests of these lengths do not fit its context.
    """
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
        while llm.stats().compiles_pending:
            time.sleep(0.1)
        yield llm
    finally:
        llm.shutdown()
