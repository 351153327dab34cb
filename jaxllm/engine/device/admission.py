"""What a slot is told when a request takes it, as the arrays that `slots.admit` and `slots.adjust` take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.engine.device.packing import SETTING_FLOATS, SETTING_INTS, admit_packing
from jaxllm.engine.device.slots import MASK_BITS, MAX_BLOCKED, Adjustments, mask_words
from jaxllm.engine.request import Request
from jaxllm.requests.sampling import MAX_LOGIT_BIAS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

_ALL = 2**30
"""More tokens than any context has."""


def admission(request: Request, pages_per_seq: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The slot's position, pages and settings: one int32 and one float32 vector."""
    packing = admit_packing(pages_per_seq)
    ints, floats = np.zeros(packing.size, np.int32), np.zeros(SETTING_FLOATS.size, np.float32)
    x, p = packing.views(ints), request.params
    x["slot"][...] = request.slot
    x["position"][...] = request.num_admitted
    x["page_table"][: len(request.pages)] = request.pages
    values = {
        "rotary_len": request.rotary_len, "top_k": min(p.top_k, vocab_size),
        "seed": np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32), "prompt_len": request.num_prompt,
        "blocked_until": request.num_prompt + p.min_tokens, "adjust": p.adjusts_logits,
        "logprobs": p.logprobs is not None, "window": _ALL if p.repeat_last_n is None else p.repeat_last_n,
    }  # fmt: skip
    for name, view in SETTING_INTS.views(x["settings"]).items():
        view[...] = values[name]
    values = {
        "temperature": p.temperature, "top_p": p.top_p, "min_p": p.min_p, "presence": p.presence_penalty,
        "frequency": p.frequency_penalty, "repetition": p.repetition_penalty,
    }  # fmt: skip
    for name, view in SETTING_FLOATS.views(floats).items():
        view[...] = values[name]
    return ints, floats


def adjustments(request: Request, max_model_len: int, vocab_size: int, eos_token_ids: Sequence[int]) -> Adjustments:
    """What adjusts the request's logits: its tokens so far, biases, and which tokens it may not or may only give."""
    p = request.params
    history = np.zeros(max_model_len + 1, np.int32)
    history[: len(request.token_ids)] = request.token_ids
    ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(p.logit_bias)], values[: len(p.logit_bias)] = list(p.logit_bias), list(p.logit_bias.values())
    blocked = np.full(MAX_BLOCKED, vocab_size, np.int32)
    stops = [*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)]
    blocked[: len(stops)] = stops
    allowed = np.full(mask_words(vocab_size), -1, np.int32)
    if p.allowed_token_ids is not None:
        bits = np.zeros(allowed.size * MASK_BITS, bool)
        bits[list(p.allowed_token_ids)] = True
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    bad_words = np.full((MAX_SPELLINGS, MAX_SPELLING_LENGTH), -1, np.int32)
    bad_words[:, -1] = vocab_size
    for row, tokens in zip(bad_words, request.bad_words, strict=False):
        row[-len(tokens) :] = tokens
    return Adjustments(np.int32(request.slot), history, ids, values, blocked, allowed, bad_words)  # type: ignore[arg-type]
