"""jaxllm in processes of its own: what clients of a server see, and how long a start takes until it is fast."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxllm import own_process
from jaxllm.cli.bench import measuring
from jaxllm.cli.bench.measuring import LOAD_GROUP, Count, JsonFile, Rate, Trace, report
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.config.sources import names_setting
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.own_process import PipedProcess
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.cli.client import ServerClient


Concurrency = Annotated[
    int | None, Parameter(name=("--max-concurrency", "--num-streams"), group=LOAD_GROUP, validator=Number(gte=1))
]


@takes_settings(ServeConfig)
def serve(
    config: ServeConfig,
    *,
    url: Annotated[str | None, Parameter(name=("--url", "--base-url"), group=LOAD_GROUP)] = None,
    num_prompts: Count = 100,
    input_len: Count = 128,
    output_len: Count = 128,
    request_rate: Rate = float("inf"),
    max_concurrency: Concurrency = None,
    num_warmups: Count = 2,
    vocab_size: Count = 32_000,
    ready_timeout: Rate = 600.0,
    json: JsonFile = None,
) -> None:
    """Latencies and tokens a second through HTTP, streamed: TTFT, TPOT, ITL and end to end.

    Starts a server with the settings below, or drives the running one at --url.

    Args:
        url: A running server, as http://127.0.0.1:8000; the settings below then only name the model and the API key.
        num_prompts: Requests in all.
        input_len: Tokens in each prompt, drawn at random.
        output_len: Tokens generated for each prompt, whatever the model says.
        request_rate: Requests a second, as a Poisson process; inf sends all at once.
        max_concurrency: Most requests in flight. [default: no limit]
        num_warmups: Requests sent and forgotten before measuring.
        vocab_size: Prompts are drawn from token ids below this.
        ready_timeout: Seconds that a server started here may take to be ready.
        json: Write the result to this file.
    """
    refused = sorted(config.model_fields_set - {"model", "api_key", "seed"})
    if url is not None and refused:
        raise ConfigError(f"{refused[0]} cannot be set with --url: that server has its own settings")
    source = random.Random(config.seed)
    warmups = measuring.random_prompts(num_warmups, input_len, vocab_size, source)
    prompts = measuring.random_prompts(num_prompts, input_len, vocab_size, source)
    times = measuring.send_times(num_prompts, request_rate, source)

    async def drive(address: str) -> tuple[list[Trace], float]:
        from jaxllm.cli.client import ServerClient

        key = config.api_key.split(",")[0] if config.api_key else None
        async with ServerClient(address, key) as client:
            is_named = "model" in config.model_fields_set and not config.served_model_name
            model = config.model if is_named else (await client.models())[0]["id"]

            async def send(prompt: list[int]) -> Trace:
                return await request(client, model, prompt, output_len)

            await asyncio.gather(*(send(prompt) for prompt in warmups))
            return await measuring.run_load(send, prompts, times, max_concurrency)

    with nullcontext(url) if url is not None else server(config, ready_timeout) as address:
        traces, duration = asyncio.run(drive(address))
    load = {
        "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len,
        "request_rate": str(request_rate), "max_concurrency": max_concurrency,
    }  # fmt: skip
    report("serve", config, load, [measuring.summarize(traces, duration)], json)
    errors = [trace.error for trace in traces if trace.error]
    if errors:
        raise ConfigError(f"{len(errors)} of {len(traces)} requests failed; the first: {errors[0]}")


async def request(client: ServerClient, model: str, prompt: list[int], output_len: int) -> Trace:
    """Stream one completion of exactly `output_len` tokens; a failure ends up in the trace."""
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    trace = Trace(start=time.perf_counter(), prompt_tokens=len(prompt))
    try:
        async for event in client.stream("/v1/completions", body):
            if event["choices"]:
                trace.arrivals.append(time.perf_counter())
            if event.get("usage"):
                trace.output_tokens = event["usage"]["completion_tokens"]
    except JaxLLMError as error:
        trace.error = str(error)
    else:
        trace.error = None if trace.arrivals else "the answer was empty"
    return trace


@contextmanager
def child(arguments: list[str], config: EngineConfig, stdout: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `jaxllm ARGUMENTS` with exactly `config`; yields the process and the file of its stderr."""
    import yaml

    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as directory:
        settings, log = Path(directory, "config.yaml"), Path(directory, "stderr.log")
        settings.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not names_setting(name)}
        command = own_process.command("jaxllm.cli.main", *arguments, "--config", str(settings))
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def failure(process: subprocess.Popen[bytes], log: Path) -> ConfigError:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("jaxllm: error: ") if lines else "it said nothing"
    return ConfigError(f"the measured process ended with exit code {process.wait()}: {last}")


@contextmanager
def server(config: EngineConfig, timeout: float) -> Iterator[str]:
    """Run `jaxllm serve` on a free port and yield its URL once it is ready and has nothing left to compile."""
    from jaxllm.sharding.wire import free_port

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with child(["serve", "--host", "127.0.0.1", "--port", str(port)], config, subprocess.DEVNULL) as (process, log):
        deadline = time.monotonic() + timeout
        while not _ready(url):
            if process.poll() is not None:
                raise failure(process, log)
            if time.monotonic() > deadline:
                raise ConfigError(f"the server was not ready after {timeout:g} s (--ready-timeout)")
            time.sleep(0.2)
        yield url


def _ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200 and _compiled(url)
    except httpx.TransportError:
        return False


def _compiled(url: str) -> bool:
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=5).raise_for_status().text
    metrics = {metric.name: metric.samples for metric in text_string_to_metric_families(text)}
    pending = metrics.get("jaxllm:compiles_pending", [])
    return bool(pending) and not any(sample.value for sample in pending)


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
    warm = {"warm_first_token_s": measuring.spread(first), "warm_full_speed_s": measuring.spread(full)}
    report("startup", config, {"num_iters": num_iters}, [cold | warm], json)


def time_to_first_token(config: EngineConfig) -> float:
    """Seconds until a fresh process with `config` puts its first byte of text on stdout. Raises ConfigError."""
    command = ["generate", "The capital of France is", "--raw", "--temperature", "0", "--max-tokens", "8"]
    begin = time.perf_counter()
    with child(command, config, subprocess.PIPE) as (process, log):
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

LAST_SECONDS, MOST_SECONDS = 4.0, 120.0
"""How long answers are asked for after everything is compiled; and how long at most."""

_PROMPT_TOKENS, _ANSWER_TOKENS = 128, 256


class Answer(NamedTuple):
    """When an answer began, its prompt's turn included, and when it ended: all of them are equally long."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def time_to_full_speed(config: EngineConfig) -> float:
    """Seconds from starting a process until its first answer at full speed. Raises ConfigError where it failed."""
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
    """When the first answer began from which on most take about as long as in the last seconds.

    Worked example: of answers of 1.5, 0.8, 0.8, 0.9, 0.8, 0.8 and 0.8 s it is the second, 1.5 s after the first began.
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
    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(**config.model_dump(exclude_unset=True)) as llm:
        began, compiled = time.monotonic(), None
        for number in itertools.count():
            prompt = [(number + token) % llm.info.vocab_size for token in range(_PROMPT_TOKENS)]
            begin = time.monotonic()
            llm.generate(prompt, params, use_tqdm=False)
            now = time.monotonic()
            pipe.send((begin, now))
            if compiled is None and not llm.stats().compiles_pending:
                compiled = now
            if now - (compiled or now) >= LAST_SECONDS or now - began >= MOST_SECONDS:
                break
    pipe.send(None)
