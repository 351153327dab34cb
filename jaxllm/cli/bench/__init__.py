"""`jaxllm bench`: how fast, offline, in one batch, through the server, from a cold start; and how good, quantized.

Here are those that run in this process: throughput, latency, and `jaxllm profile`, which traces a few steps.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from jaxllm.cli.bench.comparing import perplexity, speculation
from jaxllm.cli.bench.measuring import (
    LOAD_GROUP,
    Count,
    JsonFile,
    counts,
    offline_llm,
    report,
    say,
    spread,
    timed_generate,
)
from jaxllm.cli.bench.server import serve, startup
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@takes_settings(EngineConfig)
def throughput(
    config: EngineConfig,
    *,
    num_prompts: Annotated[list[int] | None, counts("--num-prompts", "--num-streams")] = None,
    input_len: Count = 128,
    output_len: Count = 128,
    num_iters: Count = 3,
    json: JsonFile = None,
) -> None:
    """Tokens a second of an offline batch, prefill and decode apart.

    Each number of prompts is run as a whole batch twice an iteration: once for a single token, which is prefill, and
    once for all tokens; the difference is decode. The best of the iterations counts. Prompts are random and new each
    time.

    Args:
        num_prompts: How many prompts are submitted at once; several numbers give one column each. [default: 32]
        input_len: Tokens in each prompt.
        output_len: Tokens generated for each prompt; at least 2.
        num_iters: Repetitions.
        json: Write the result to this file.
    """
    if output_len < 2:
        raise ConfigError(f"--output-len is {output_len}: it must be at least 2, the first token comes from prefill")
    with offline_llm(config, input_len, output_len) as llm:
        source = random.Random(config.seed)
        results = [measure(llm, count, input_len, output_len, num_iters, source) for count in num_prompts or [32]]
    load = {"input_len": input_len, "output_len": output_len, "num_iters": num_iters}
    report("throughput", config, load, results, json)


def measure(
    llm: LLM, count: int, input_len: int, output_len: int, iterations: int, source: random.Random
) -> dict[str, Any]:
    """One column: `count` prompts together. Decoding is what a run takes longer than its prefill, or None."""
    say(f"{count} prompts: a first run, {iterations} of their prefill, {iterations} of all tokens")
    first = timed_generate(llm, count, input_len, output_len, source)
    say(f"the first run took {first:.1f} s")
    prefill = min(timed_generate(llm, count, input_len, 1, source) for _ in range(iterations))
    total = min(timed_generate(llm, count, input_len, output_len, source) for _ in range(iterations))
    return {
        "num_prompts": count,
        "duration_s": total,
        "requests_per_s": count / total,
        "total_tokens_per_s": count * (input_len + output_len) / total,
        "output_tokens_per_s": count * output_len / total,
        "prefill_tokens_per_s": count * input_len / prefill,
        "decode_tokens_per_s": count * (output_len - 1) / (total - prefill) if total > prefill else None,
    }


@takes_settings(EngineConfig)
def latency(
    config: EngineConfig,
    *,
    batch_size: Count = 8,
    input_len: Count = 32,
    output_len: Count = 128,
    num_iters: Count = 10,
    num_iters_warmup: Count = 2,
    json: JsonFile = None,
) -> None:
    """Seconds from submitting a batch until all of it is there.

    Args:
        batch_size: Prompts in the batch.
        input_len: Tokens in each prompt.
        output_len: Tokens generated for each prompt.
        num_iters: Measured repetitions.
        num_iters_warmup: Repetitions before them.
        json: Write the result to this file.
    """
    with offline_llm(config, input_len, output_len) as llm:
        source = random.Random(config.seed)
        for _ in range(num_iters_warmup):
            timed_generate(llm, batch_size, input_len, output_len, source)
        say(f"{num_iters} runs of {batch_size} prompts")
        seconds = [timed_generate(llm, batch_size, input_len, output_len, source) for _ in range(num_iters)]
    load = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "num_iters": num_iters}
    report("latency", config, load, [{"latency_s": spread(seconds)}], json)


@takes_settings(EngineConfig)
def profile(
    config: EngineConfig,
    *,
    output: Path,
    num_prompts: Annotated[Count, Parameter(name=("--num-prompts", "--num-streams"), group=LOAD_GROUP)] = 1,
    input_len: Count = 128,
    num_steps: Count = 16,
) -> None:
    """Write a trace of prefill and some decode steps, for Perfetto or XProf, and print where it is.

    The same load has run once before, so that nothing is compiled in the trace.

    Args:
        output: The folder that the trace is written to; made if it is not there.
        num_prompts: How many random prompts are submitted at once.
        input_len: Tokens in each prompt.
        num_steps: Tokens generated for each prompt.
    """
    import jax

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output is {str(output)!r}: {error.strerror}; it must be a folder") from None
    source = random.Random(config.seed)
    with offline_llm(config, input_len, num_steps) as llm:
        timed_generate(llm, num_prompts, input_len, num_steps, source)
        with jax.profiler.trace(str(output), create_perfetto_trace=True):
            timed_generate(llm, num_prompts, input_len, num_steps, source)
    print(max(output.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime))


bench = App(
    name="bench",
    help="Measure throughput, latency, the server, start-up, and what drafts and quantized weights change.",
)
for command in (throughput, latency, serve, startup, speculation, perplexity):
    bench.command(command)
