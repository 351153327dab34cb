"""`jaxllm profile`: what the device and the host do during a few steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.bench.flags import LOAD_GROUP, Count
from jaxllm.cli.bench.load import offline_llm, random_prompts, timed_generate
from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError


@takes_settings(EngineConfig)
def profile(
    config: EngineConfig,
    *,
    output: Annotated[Path, Parameter(group=COMMAND_GROUP)],
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
        first, traced = (random_prompts(num_prompts, input_len, llm.info.vocab_size, source) for _ in range(2))
        timed_generate(llm, first, num_steps)
        with jax.profiler.trace(str(output), create_perfetto_trace=True):
            timed_generate(llm, traced, num_steps)
    print(max(output.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime))
