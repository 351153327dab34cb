"""`jaxllm bench latency`: one batch, over and over."""

from __future__ import annotations

import random

from jaxllm.cli.bench.flags import Count, JsonFile
from jaxllm.cli.bench.load import offline_llm, random_prompts, timed_generate
from jaxllm.cli.bench.report import report
from jaxllm.cli.bench.stats import spread
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig


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
        seconds = [
            timed_generate(llm, random_prompts(batch_size, input_len, llm.info.vocab_size, source), output_len)
            for _ in range(num_iters_warmup + num_iters)
        ][num_iters_warmup:]
    load = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "num_iters": num_iters}
    report("latency", config, load, [{"latency_s": spread(seconds)}], json)
