"""Engines compared: quantized weights with float ones, and drafts with none."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from jaxllm.cli.bench.measuring import LOAD_GROUP, Count, JsonFile, counts, report, say, wait_until_compiled
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig, make_config
from jaxllm.errors import ConfigError, reason
from jaxllm.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


TEXT = Path(__file__).with_name("perplexity.txt")
"""The first three chapters of Alice's Adventures in Wonderland (1865, public domain), one paragraph a line."""

EXPANDED, STORED = "float", "stored"
"""Weights in the model's float type, which is what others are measured against; weights as the file has them."""

PAGES = {"kv_int8": "int8", "kv_fp8": "fp8"}
"""Float weights with keys and values in pages of these types."""


@takes_settings(EngineConfig)
def perplexity(
    config: EngineConfig,
    *,
    schemes: Annotated[str, Parameter(group=LOAD_GROUP)] = STORED,
    window: Count = 512,
    tokens: Count = 100_000,
    text: Annotated[Path, Parameter(group=LOAD_GROUP)] = TEXT,
    json: JsonFile = None,
) -> None:
    """Perplexity of a text under float weights and under quantized ones, with the memory that each takes.

    Args:
        schemes: What to compare with float: stored, the kinds of --isq, kv_int8 and kv_fp8, separated by commas.
        window: Tokens that are seen together; the first of each window is not predicted.
        tokens: Most tokens of the text that are used.
        text: Another text than the one that comes with jaxllm.
        json: Write the result to this file.
    """
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    try:
        passage = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text is {str(text)!r}, which cannot be read: {reason(error)}") from None
    settings = [scheme_config(config, name, window) for name in (EXPANDED, *names)]
    results: list[dict[str, Any]] = []
    for name, setting in zip((EXPANDED, *names), settings, strict=True):
        result = measure(setting, passage, window, tokens)
        print(f"{name}: {result['perplexity']:.3f}", file=sys.stderr)
        base = results[0]["perplexity"] if results else result["perplexity"]
        results.append({"weights": name, **result, "difference_percent": 100 * (result["perplexity"] / base - 1)})
    load = {"schemes": names, "window": window, "tokens": tokens, "text": str(text)}
    report("perplexity", config, load, results, json)


def scheme_config(config: EngineConfig, scheme: str, window: int) -> EngineConfig:
    """`config` with weights, or keys and values, kept as `scheme`. Raises ConfigError for one that is unknown."""
    fields = config.model_dump(exclude_unset=True) | {
        "isq": None if scheme in (EXPANDED, STORED, *PAGES) else scheme,
        "kv_cache_dtype": PAGES.get(scheme, config.kv_cache_dtype),
        "dequantize": scheme != STORED,
        "max_model_len": window + 2,
        "max_num_seqs": 4,
        "enforce_eager": True,  # two of all the buckets are used
        "enable_prefix_caching": False,
        "engine_process": False,
    }
    return make_config(EngineConfig, **fields)


def measure(config: EngineConfig, passage: str, window: int, tokens: int) -> dict[str, Any]:
    from jaxllm.engine.start.blueprint import plan_engine
    from jaxllm.llm import LLM

    plan = plan_engine(config)
    llm = LLM(**config.model_dump(exclude_unset=True))
    try:
        prompts = list(windows(llm, passage, window, tokens))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    scores = [
        entry[token].logprob
        for ids, output in zip(prompts, outputs, strict=True)
        for token, entry in list(zip(ids, output.prompt_logprobs or [], strict=True))[1:]
        if entry is not None
    ]
    return {
        "perplexity": math.exp(-sum(scores) / len(scores)),
        "tokens_scored": len(scores),
        "weights_mib": plan.weight_bytes / 2**20,
        "bits_per_weight": 8 * plan.weight_bytes / plan.num_parameters,
    }


def windows(llm: LLM, passage: str, window: int, tokens: int) -> Iterator[list[int]]:
    """The passage's tokens in pieces of `window`, each after the token that begins texts where the model has one."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(passage)
    begin = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(begin) :][:tokens]
    step = window - len(begin)
    for start in range(0, len(ids) - 1, step):
        piece = ids[start : start + step]
        if len(begin) + len(piece) > 1:
            yield begin + piece


QUESTIONS = Path(__file__).with_name("questions.json")
"""Kind of text -> what is asked: to edit short programs, to extract sentences from Alice's Adventures, and freely."""

DRAFTS = {
    "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    "num_speculative_tokens_per_batch_size": [(1, 1, 8), (2, 4096, 4)],
}  # fmt: skip


@takes_settings(EngineConfig)
def speculation(
    config: EngineConfig,
    *,
    num_streams: Annotated[list[int] | None, counts("--num-streams")] = None,
    output_len: Count = 256,
    num_iters: Count = 3,
    json: JsonFile = None,
) -> None:
    """Tokens a second with drafts and without, in turns: on code edits, extraction from a text, and free text.

    Both engines answer the same, or the benchmark fails. A speedup is the median of those of the iterations. Before
    them one round is not counted: it leaves the prompts in the prefix cache, so that the answers alone are compared.

    Args:
        num_streams: How many answers are under way at a time; the next question begins when one ends. Several numbers
            give more rows. [default: 1 4]
        output_len: Most tokens of an answer.
        num_iters: Repetitions.
        json: Write the result to this file.
    """
    from jaxllm.llm import LLM

    given = {"max_model_len": 2048} | config.model_dump(exclude_unset=True)
    if "max_num_seqs" in given:
        raise ConfigError(f"max_num_seqs is {config.max_num_seqs}, and here num_streams sets it; leave it out")
    streams = num_streams or [1, 4]
    drafts = given.pop("speculative_config", None) or DRAFTS
    questions: dict[str, list[str]] = msgspec.json.decode(QUESTIONS.read_bytes())
    results: list[dict[str, Any]] = []
    for count in streams:
        sizes = given | {"max_num_seqs": count}
        with LLM(**sizes) as plain, LLM(**sizes, speculative_config=drafts) as drafting:
            for llm in (plain, drafting):
                wait_until_compiled(llm)
            for kind, asked in questions.items():
                say(f"{count} streams of {kind}: {num_iters + 1} rounds of each engine")
                results.append(_compare(plain, drafting, kind, count, asked, output_len, num_iters))
    results.sort(key=lambda result: list(questions).index(result["text"]))
    load = {"num_streams": streams, "output_len": output_len, "num_iters": num_iters, "speculative_config": drafts}
    report("speculation", config, load, results, json)


def _compare(
    plain: LLM, drafting: LLM, kind: str, count: int, questions: list[str], output_len: int, num_iters: int
) -> dict[str, Any]:
    conversations = [[{"role": "user", "content": question}] for question in questions] * count
    params = SamplingParams(temperature=0, max_tokens=output_len, detokenize=False)
    before, rates = drafting.stats(), list[tuple[float, float]]()
    for iteration in range(num_iters + 1):
        pair = [_rate(llm, conversations, params) for llm in (plain, drafting)]
        if pair[0][1] != pair[1][1]:
            raise ConfigError(f"with drafts the answers to {kind} are others than without: this is a fault of jaxllm")
        if iteration:  # the first time something may still be loaded
            rates.append((pair[0][0], pair[1][0]))
    after = drafting.stats()
    tried = after.num_draft_tokens - before.num_draft_tokens
    taken = sum(after.accepted_by_position) - sum(before.accepted_by_position)
    return {
        "text": kind,
        "streams": count,
        "without_tok_s": statistics.median(rate for rate, _ in rates),
        "with_tok_s": statistics.median(rate for _, rate in rates),
        "speedup": statistics.median(drafted / alone for alone, drafted in rates),
        "accepted": taken / tried if tried else 0.0,
    }


def _rate(llm: LLM, conversations: list[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens a second of all answers, as many of which are under way as the engine has places for; and the answers."""
    begin = time.perf_counter()
    said = [output.outputs[0].token_ids for output in llm.chat(conversations, params, use_tqdm=False)]
    return sum(map(len, said)) / (time.perf_counter() - begin), said
