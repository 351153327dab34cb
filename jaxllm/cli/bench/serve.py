"""`jaxllm bench serve`: what clients of a server see."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxllm.cli.bench.flags import LOAD_GROUP, Count, JsonFile, Rate
from jaxllm.cli.bench.load import random_prompts, run_load, send_times
from jaxllm.cli.bench.report import report
from jaxllm.cli.bench.stats import Trace, summarize
from jaxllm.cli.settings import takes_settings
from jaxllm.config import ServeConfig
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
    from jaxllm.cli.bench.process import server

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
