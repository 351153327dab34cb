"""When a fresh engine is at full speed: one stream of answers until nothing is left to compile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.own_process import PipedProcess
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

NEAR = 0.95
"""The part of the last speed that counts as full speed."""
MOST = 0.75
"""The part of the answers that follow which must be at full speed too: others' work holds up some."""

ENOUGH_SECONDS, LAST_SECONDS, MOST_SECONDS = 4.0, 4.0, 120.0
"""How long answers are asked for at least; how long after everything is compiled, which is their full speed; and how
long at most, as a machine that does other work compiles when that leaves it time."""

_PROMPT, _TOKENS = 128, 256


class Answer(NamedTuple):
    """When an answer began, its prompt's turn included, and when it ended: all of them are equally long."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def time_to_full_speed(config: EngineConfig) -> float:
    """Seconds from starting a process with `config` until it begins the first answer that is as quick as they stay.

    Raises:
        ConfigError: the process failed; its own message is on stderr.
    """
    begin = time.monotonic()  # which is the same clock in every process
    process, answers = PipedProcess(speak, config.model_dump_json(exclude_unset=True)), []
    try:
        while (answer := process.pipe.recv()) is not None:
            answers.append(Answer(*answer))
    except EOFError:
        process.wait(10)
        raise ConfigError(f"the measured process ended with exit code {process.exit_code}") from None
    finally:
        process.kill()
    return full_speed_since(answers) - begin


def full_speed_since(answers: Sequence[Answer]) -> float:
    """When the first answer began from which on they take about as long as in the last seconds, it and most behind it.

    Worked example, answers of 1.5, 0.8, 0.8, 0.9, 0.8, 0.8 and 0.8 s, one after the other: the last take 0.8 s, the
    first is too slow, and most of those from the second on are not: 1.5 s after the first began.
    """
    since = answers[-1].end - LAST_SECONDS
    final = median(answer.seconds for answer in answers if answer.end > since)
    for index, answer in enumerate(answers):
        rest = sorted(later.seconds for later in answers[index:])
        if max(answer.seconds, rest[int(len(rest) * MOST)]) * NEAR <= final:
            return answer.begin
    return answers[-1].begin


def speak(pipe: Connection, settings: str) -> None:
    """In the measured process: one answer after another, and when each began and ended; None ends them."""
    from jaxllm.llm import LLM

    config = EngineConfig.model_validate_json(settings)
    with LLM(**config.model_dump(exclude_unset=True)) as llm:
        asyncio.run(_speak(pipe, llm))
    pipe.send(None)


async def _speak(pipe: Connection, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    began, compiled = time.monotonic(), 0.0
    for number in itertools.count():
        prompt = [(number + token) % llm.info.vocab_size for token in range(_PROMPT)]
        begin = time.monotonic()
        async for _ in llm.asynchronous().stream(prompt, params):
            pass
        now = time.monotonic()
        pipe.send((begin, now))
        compiled = compiled or (now if not llm.stats().compiles_pending else 0.0)
        done = compiled and now - compiled >= LAST_SECONDS and now - began >= ENOUGH_SECONDS
        if done or now - began >= MOST_SECONDS:
            return
