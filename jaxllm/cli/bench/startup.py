"""`jaxllm bench startup`: from starting the process to its first token, and to its full speed."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.cli.bench.measuring import Count, JsonFile, report, spread
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.own_process import PipedProcess
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


_PROMPT = "The capital of France is"


@takes_settings(EngineConfig)
def startup(config: EngineConfig, *, num_iters: Count = 3, json: JsonFile = None) -> None:
    """Seconds from process start to first token and to full speed, with an empty compile cache and then a full one.

    Each start is a process of its own: `jaxllm generate` for the first token, and one stream that goes on until nothing
    is left to compile for full speed, from when on it is within 5 % of what it stays at. The model has been downloaded
    before and its file is likely in the system's page cache.

    Args:
        num_iters: Starts with a full compile cache.
        json: Write the result to this file.
    """
    from jaxllm.weights.source import resolve_model

    resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    with tempfile.TemporaryDirectory(prefix="jaxllm-compile-", ignore_cleanup_errors=True) as cache:
        measured = config.model_copy(update={"compile_cache_dir": Path(cache)})
        cold = {"cold_first_token_s": time_to_first_token(measured)}
        shutil.rmtree(cache)
        cold["cold_full_speed_s"] = time_to_full_speed(measured)  # and now everything is compiled
        first = [time_to_first_token(measured) for _ in range(num_iters)]
        full = [time_to_full_speed(measured) for _ in range(num_iters)]
    warm = {"warm_first_token_s": spread(first), "warm_full_speed_s": spread(full)}
    report("startup", config, {"num_iters": num_iters}, [cold | warm], json)


def time_to_first_token(config: EngineConfig) -> float:
    """Seconds until a fresh process with `config` puts its first byte of text on stdout.

    Raises:
        ConfigError: the process failed; with its message.
    """
    from jaxllm.cli.bench.server import child, failure

    begin = time.perf_counter()
    with child(["generate", _PROMPT, "--raw", "--temperature", "0", "--max-tokens", "8"], config, subprocess.PIPE) as (
        process,
        log,
    ):
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
        if not first or process.wait() != 0:
            raise failure(process, log)
    return seconds


NEAR = 0.95
"""The part of the last speed that counts as full speed."""
MOST = 0.75
"""The part of the answers that follow which must be at full speed too: others' work holds up some."""

ENOUGH_SECONDS, LAST_SECONDS, MOST_SECONDS = 4.0, 4.0, 120.0
"""How long answers are asked for at least; how long after everything is compiled, which is their full speed; and how
long at most, as a machine that does other work compiles when that leaves it time."""

_PROMPT_TOKENS, _ANSWER_TOKENS = 128, 256


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
    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    began, compiled = time.monotonic(), 0.0
    for number in itertools.count():
        prompt = [(number + token) % llm.info.vocab_size for token in range(_PROMPT_TOKENS)]
        begin = time.monotonic()
        async for _ in llm.asynchronous().stream(prompt, params):
            pass
        now = time.monotonic()
        pipe.send((begin, now))
        compiled = compiled or (now if not llm.stats().compiles_pending else 0.0)
        done = compiled and now - compiled >= LAST_SECONDS and now - began >= ENOUGH_SECONDS
        if done or now - began >= MOST_SECONDS:
            return
