"""`jaxllm bench serve`: what clients of a server see; and jaxllm in a process of its own, as benchmarks start it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxllm import own_process
from jaxllm.cli.bench.measuring import (
    LOAD_GROUP,
    Count,
    JsonFile,
    Rate,
    Trace,
    random_prompts,
    report,
    run_load,
    send_times,
    summarize,
)
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.config.sources import names_setting
from jaxllm.errors import ConfigError, JaxLLMError

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
    if url is not None:
        url = url.rstrip("/").removesuffix("/v1")

    with nullcontext(url) if url is not None else server(config, ready_timeout) as address:
        source = random.Random(config.seed)
        warmups = random_prompts(num_warmups, input_len, vocab_size, source)
        prompts = random_prompts(num_prompts, input_len, vocab_size, source)
        times = send_times(num_prompts, request_rate, source)
        traces, duration = asyncio.run(_drive(address, config, warmups, prompts, times, output_len, max_concurrency))
    load = {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "request_rate": str(request_rate),
        "max_concurrency": max_concurrency,
    }
    report("serve", config, load, [summarize(traces, duration)], json)
    errors = [trace.error for trace in traces if trace.error]
    if errors:
        raise ConfigError(f"{len(errors)} of {len(traces)} requests failed; the first: {errors[0]}")


async def _drive(
    url: str,
    config: ServeConfig,
    warmups: list[list[int]],
    prompts: list[list[int]],
    times: list[float],
    output_len: int,
    concurrency: int | None,
) -> tuple[list[Trace], float]:
    from jaxllm.cli.client import ServerClient

    key = config.api_key.split(",")[0] if config.api_key else None
    async with ServerClient(url, key) as client:
        model = (
            config.model
            if "model" in config.model_fields_set and not config.served_model_name
            else await client.model()
        )

        async def send(prompt: list[int]) -> Trace:
            return await request(client, model, prompt, output_len)

        await asyncio.gather(*(send(prompt) for prompt in warmups))
        return await run_load(send, prompts, times, concurrency)


async def request(client: ServerClient, model: str, prompt: list[int], output_len: int) -> Trace:
    """Stream one completion of exactly `output_len` tokens; a failure ends up in the trace."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
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


_STOP_SECONDS = 20
_PENDING = "jaxllm:compiles_pending"


@contextmanager
def child(arguments: list[str], config: EngineConfig, stdout: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `jaxllm ARGUMENTS` with exactly `config`; yields the process and the file its stderr goes to.

    The configuration travels as a file only its owner can read, and is the child's only source of settings.
    """
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
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def failure(process: subprocess.Popen[bytes], log: Path) -> ConfigError:
    """The child's own last words."""
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

    metrics = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=5).raise_for_status().text)
    pending = [sample.value for metric in metrics if metric.name == _PENDING for sample in metric.samples]
    return bool(pending) and not any(pending)
