"""`jaxllm bench perplexity`: what each way of keeping the weights costs in quality, and what it saves."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.bench.measuring import LOAD_GROUP, Count, JsonFile, report
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
    """The perplexity of `passage`, and what its weights take."""
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
    """The passage's tokens in pieces of `window`, each behind the token that begins texts where the model has one."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(passage)
    begin = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(begin) :][:tokens]
    step = window - len(begin)
    for start in range(0, len(ids) - 1, step):
        piece = ids[start : start + step]
        if len(begin) + len(piece) > 1:
            yield begin + piece
