"""`jaxllm bench throughput`: many prompts at once, offline."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Any

from jaxllm.cli.bench.flags import Count, JsonFile, counts
from jaxllm.cli.bench.load import offline_llm, random_prompts, timed_generate
from jaxllm.cli.bench.report import report
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.llm import LLM

PromptCounts = Annotated[list[int] | None, counts("--num-prompts", "--num-streams")]


@takes_settings(EngineConfig)
def throughput(
    config: EngineConfig,
    *,
    num_prompts: PromptCounts = None,
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
    """One column: `count` prompts together, after one unmeasured round.

    Decoding is what a run takes longer than its prefill; None where it took no longer, which says nothing of it.
    """

    def seconds(length: int) -> float:
        return timed_generate(llm, random_prompts(count, input_len, llm.info.vocab_size, source), length)

    seconds(output_len)
    prefill = min(seconds(1) for _ in range(iterations))
    total = min(seconds(output_len) for _ in range(iterations))
    return {
        "num_prompts": count,
        "duration_s": total,
        "requests_per_s": count / total,
        "total_tokens_per_s": count * (input_len + output_len) / total,
        "output_tokens_per_s": count * output_len / total,
        "prefill_tokens_per_s": count * input_len / prefill,
        "decode_tokens_per_s": count * (output_len - 1) / (total - prefill) if total > prefill else None,
    }
