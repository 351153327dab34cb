"""What a slot is told when a request takes it, as the arrays that `slots.admit` and `slots.adjust` take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.engine.device.packing import SETTING_FLOATS, SETTING_INTS, admit_packing
from jaxllm.engine.device.slots import MAX_BLOCKED
from jaxllm.engine.masks import ALL, mask_of, mask_words
from jaxllm.engine.request import Request
from jaxllm.engine.settings import Adjustments, Settings
from jaxllm.requests.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

_ALL = 2**30
"""More tokens than any context has."""


def settings_of(request: Request, vocab_size: int, eos_token_ids: Sequence[int]) -> Settings:
    """Everything about a request that does not depend on when it runs.

    Raises:
        OverflowError, ValueError: a value does not fit where the device keeps it.
    """
    p = request.params
    ints, floats = np.zeros(SETTING_INTS.size, np.int32), np.zeros(SETTING_FLOATS.size, np.float32)
    values = {
        "top_k": min(p.top_k, vocab_size), "prompt_len": request.num_prompt, "adjust": p.adjusts_logits,
        "seed": np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32),
        "blocked_until": request.num_prompt + p.min_tokens, "logprobs": p.logprobs is not None,
        "window": _ALL if p.repeat_last_n is None else p.repeat_last_n, "temperature": p.temperature,
        "top_p": p.top_p, "min_p": p.min_p, "presence": p.presence_penalty, "frequency": p.frequency_penalty,
        "repetition": p.repetition_penalty,
        "asked_ids": np.array([*[-1] * (MAX_LOGPROBS - len(p.logprob_token_ids)), *p.logprob_token_ids], np.int32),
    }  # fmt: skip
    views = SETTING_INTS.views(ints) | SETTING_FLOATS.views(floats)
    for name, value in values.items():
        views[name][...] = value
    adjusts = _adjustments(request, vocab_size, eos_token_ids) if p.adjusts_logits else None
    return Settings(ints, floats, adjusts)


def admission(request: Request, settings: Settings, pages_per_seq: int) -> np.ndarray:
    """The int32 vector of a request that takes its slot: where it begins, its pages so far, and its settings."""
    packing = admit_packing(pages_per_seq)
    ints = np.zeros(packing.size, np.int32)
    x = packing.views(ints)
    x["slot"][...] = request.slot
    x["position"][...] = request.num_admitted
    x["page_table"][: len(request.pages)] = request.pages
    x["settings"][:] = settings.ints
    SETTING_INTS.views(x["settings"])["rotary_len"][...] = request.rotary_len
    return ints


def adapter_scales(request: Request, places: int) -> np.ndarray:
    """How much of each adapter on the devices is added for a request, float32 `[places]`."""
    scales = np.zeros(places, np.float32)
    for use, place in zip(request.adapters, request.adapter_places, strict=True):
        scales[place] = use.scale
    return scales


def history(request: Request, max_model_len: int) -> np.ndarray:
    """The int32 row of the tokens that a request has when it takes its slot."""
    row = np.zeros(max_model_len + 1, np.int32)
    row[: len(request.token_ids)] = request.token_ids
    return row


def _adjustments(request: Request, vocab_size: int, eos_token_ids: Sequence[int]) -> Adjustments:
    p = request.params
    ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(p.logit_bias)], values[: len(p.logit_bias)] = list(p.logit_bias), list(p.logit_bias.values())
    blocked = np.full(MAX_BLOCKED, vocab_size, np.int32)
    stops = [*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)]
    blocked[: len(stops)] = stops
    allowed = np.full(mask_words(vocab_size), ALL, np.int32)
    if p.allowed_token_ids is not None:
        allowed = mask_of(p.allowed_token_ids, vocab_size)
    bad_words = np.full((MAX_SPELLINGS, MAX_SPELLING_LENGTH), -1, np.int32)
    bad_words[:, -1] = vocab_size
    for row, tokens in zip(bad_words, request.bad_words, strict=False):
        row[-len(tokens) :] = tokens
    nowhere = np.array([-1], np.int32)
    return Adjustments(nowhere, ids, values, blocked, allowed, bad_words)  # type: ignore[arg-type]
