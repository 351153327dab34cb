"""Where requests go among several engines of one model: hits of the prefix cache, and how evenly work is shared.

Conversations run side by side, some with the same system prompt, each turn as soon as the one before it is answered.
What is told are counters of the engines, no seconds: by the longest known prefix first, and in turn. They are the same
for a model of any size.

    python benchmarks/replicas.py [--replicas 2] [--conversations 24] [--turns 5] [--model NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

from jaxllm import AsyncLLM, EngineConfig, SamplingParams
from jaxllm.engine.doors.replicas import start_replicas
from jaxllm.engine.doors.streams import Streams
from jaxllm.engine.scale.routing import Policy, prefix_first

SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 96, 32, 8
CONVERSATIONS_A_PROMPT = 4
"""Conversations that begin with the same system prompt."""


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    longest = SYSTEM_TOKENS + arguments.turns * (TURN_TOKENS + ANSWER_TOKENS) + ANSWER_TOKENS
    return EngineConfig(
        model=arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=arguments.conversations,  # so the cache of one engine has room for all of them
        enforce_eager=True,
        decode_buckets=frozenset(),
        prefill_buckets=frozenset(),
        kv_cache_memory=arguments.kv_cache_memory,
        engine_process=True,
        data_parallel_size=arguments.replicas,
    )


async def converse(engine: AsyncLLM, system: list[int], turns: int, words: random.Random) -> None:
    vocabulary = engine.info.vocab_size
    prompt = list(system)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for _ in range(turns):
        prompt += [words.randrange(vocabulary) for _ in range(TURN_TOKENS)]
        async for _, delta in engine.stream(prompt.copy(), params):
            prompt += delta.token_ids


async def converse_all(engine: AsyncLLM, conversations: int, turns: int) -> None:
    words = random.Random(0)
    vocabulary = engine.info.vocab_size
    count = -(-conversations // CONVERSATIONS_A_PROMPT)
    systems = [[words.randrange(vocabulary) for _ in range(SYSTEM_TOKENS)] for _ in range(count)]
    order = [systems[at % count] for at in range(conversations)]
    await asyncio.gather(*(converse(engine, system, turns, random.Random(at)) for at, system in enumerate(order)))


def measure(arguments: argparse.Namespace, policy: Policy) -> dict[str, Any]:
    """Counters of one run, with engines of its own."""
    config = config_of(arguments)
    replicas = start_replicas(config, policy=policy)
    streams = Streams(replicas, None, start=lambda given_up: start_replicas(config, given_up, policy=policy))
    try:
        asyncio.run(converse_all(AsyncLLM.sharing(config, streams), arguments.conversations, arguments.turns))
        each = replicas.each
    finally:
        streams.shutdown()
    prompts, cached = sum(s.prompt_tokens for s in each), sum(s.cached_prompt_tokens for s in each)
    work = [s.prompt_tokens - s.cached_prompt_tokens + s.generation_tokens for s in each]
    return {
        "prompt_tokens": [s.prompt_tokens for s in each],
        "cached_share": cached / prompts,
        "computed_tokens": work,
    }


def numbers(values: list[int]) -> str:
    return " and ".join(f"{value:,}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-cache-memory", type=int, default=256 * 2**20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    turns = itertools.count()
    policies: dict[str, Policy] = {
        "prefix": prefix_first,
        "in turn": lambda request, replicas: replicas[next(turns) % len(replicas)],
    }
    found = {name: measure(arguments, policy) for name, policy in policies.items()}
    for name, one in found.items():
        print(
            f"{name:8} prompt tokens of each {numbers(one['prompt_tokens'])}, {one['cached_share']:.1%} of them from "
            f"the cache; tokens computed by each {numbers(one['computed_tokens'])}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
