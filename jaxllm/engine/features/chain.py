"""llama.cpp's further samplers: DRY, top-n-sigma, typical sampling and XTC.

A request that uses one of them is truncated here, in the order that llama.cpp has by default: penalties and masks, DRY,
top-n-sigma, top_k, typical_p, top_p, min_p, XTC, and the temperature last. The core is left to divide and to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

from jaxllm.engine.core.feature import Errand, Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import (
    MASK_BITS,
    NEGATIVE,
    SamplingRows,
    greatest,
    mask_of,
    mask_words,
    truncate,
    uniform,
)  # fmt: skip
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.messages import EngineRequest
from jaxllm.pallas_kernels.products import PLAIN_SUMS, SoftmaxSums

LONGEST_REPEAT = 128
"""DRY counts no further: at its default base a repeat of that many tokens costs more than any logit is worth."""
MOST_PENALTY = 1e30
"""So that a logit stays a number whatever is taken off it."""
XTC_STREAM = 0x58544321
"""Parts the numbers that XTC goes by from those that tokens are drawn by: both are of the seed and the position."""

_FLOATS = Packing(
    dry_multiplier=(), dry_base=(), top_n_sigma=(), typical_p=(), top_p=(), min_p=(), xtc_probability=(),
    xtc_threshold=(),
)  # fmt: skip
_INTS = Packing(dry_allowed_length=(), dry_penalty_last_n=(), top_k=())

Rows = dict[str, np.ndarray]
"""What one slot is told, by the names of `ChainFeature.slot`."""


class ChainFeature(Feature):
    """Its rows: `floats` and `ints`, a request's fields by their own names; `breakers` [V/32], a bit for each token
    across which DRY sees no repeat.
    """

    name = "chaining"
    on = ("decode", "verify", "head")
    rare = samples = has_part = reads_history = True
    asked_by = ("chains_samplers",)

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        words = mask_words(sizes.vocab_size)
        return {
            "breakers": ((words,), jnp.int32),
            "floats": ((_FLOATS.size,), jnp.float32),
            "ints": ((_INTS.size,), jnp.int32),
        }

    def prepare(self, request: Request, asked: EngineRequest) -> Rows:
        p, vocab_size = request.params, self.around.sizes.vocab_size
        rows: Rows = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.slot(self.around.sizes).items()}
        told = {name: getattr(p, name) for name in (*_FLOATS.fields, *_INTS.fields)}
        told |= {"top_k": min(p.top_k, vocab_size)}
        if p.dry_penalty_last_n is None:
            told |= {"dry_penalty_last_n": 2**30}
        if p.temperature == 0:  # the likeliest token stays, whatever else is cut off
            told |= {"typical_p": 1.0, "xtc_probability": 0.0}
        for packing, row in ((_FLOATS, rows["floats"]), (_INTS, rows["ints"])):
            for name, view in packing.views(row).items():
                view[...] = told[name]
        request.params = replace(p, top_k=0, top_p=1.0, min_p=0.0)  # the core truncates nothing after it
        return rows

    def job(self, request: Request, extra: Rows) -> Errand | None:
        p, tokenizer = request.params, self.around.tokenizer
        if not (p.dry_multiplier and p.dry_sequence_breakers) or tokenizer is None:
            return None

        def find() -> None:
            extra["breakers"] = breaker_mask(tokenizer, tuple(p.dry_sequence_breakers), self.around.sizes.vocab_size)

        return Errand(find)

    def needs(self, request: Request, extra: Rows) -> Iterable[Key]:
        return [Key("put", 0, frozenset({self.name}))]

    def seat(self, request: Request, extra: Rows) -> None:
        values = jax.tree.leaves(extra)
        self.around.device.run(Key("put", 0, frozenset({self.name})), np.array([request.slot], np.int32), *values)

    def traced(self, step: TracedStep) -> Traced:
        sums = step.maker.model(dict(step.parts)).kernels.sums
        return _Chain(step.parts[self.name], self.bit, sums)


class _Chain(Traced):
    def __init__(self, kept: dict[str, jax.Array], bit: int, sums: SoftmaxSums):
        self._kept, self._bit, self._sums = kept, bit, sums

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        own = {name: kept[rows.slot] for name, kept in self._kept.items()}
        return chain(logits, rows.uses & self._bit > 0, rows, slots.history, own, self._sums)


def chain(
    logits: Float[Array, "R V"],
    used: Bool[Array, "R"],
    rows: SamplingRows,
    slot_history: Int[Array, "slots L"],
    own: dict[str, jax.Array],
    sums: SoftmaxSums = PLAIN_SUMS,
) -> Float[Array, "R V"]:
    """What the samplers leave of the logits, in the rows that are `used`; `own` are rows of `ChainFeature.slot`.

    A sampler that no row asks for is skipped at run time.
    """
    p = _FLOATS.unpack(own["floats"]) | _INTS.unpack(own["ints"])
    no_k, no_p = jnp.zeros_like(p["top_k"]), jnp.ones_like(p["top_p"])

    def repeats(x: jax.Array) -> jax.Array:
        longest = repeated(slot_history[rows.slot], rows.position, p["dry_penalty_last_n"], own["breakers"], x.shape[1])
        return dry(x, longest, p["dry_multiplier"], p["dry_base"], p["dry_allowed_length"])

    chance = uniform(rows.seed ^ XTC_STREAM, rows.position)
    steps: list[tuple[jax.Array, Callable[[jax.Array], jax.Array]]] = [
        ((p["dry_multiplier"] > 0) & (p["dry_penalty_last_n"] > 0), repeats),
        (p["top_n_sigma"] > 0, lambda x: top_n_sigma(x, p["top_n_sigma"])),
        (p["top_k"] > 0, lambda x: truncate(x, p["top_k"], no_p, 1 - no_p, sums)),
        (p["typical_p"] < 1, lambda x: typical(x, p["typical_p"], sums)),
        (p["top_p"] < 1, lambda x: truncate(x, no_k, p["top_p"], 1 - no_p, sums)),
        (p["min_p"] > 0, lambda x: jnp.where(x >= (x.max(-1) + jnp.log(p["min_p"]))[:, None], x, NEGATIVE)),
        (chance < p["xtc_probability"], lambda x: xtc(x, p["xtc_threshold"], sums)),
    ]
    for asked, change in steps:
        logits = lax.cond(jnp.any(asked & used), partial(_in_rows, change, asked & used), lambda x: x, logits)
    return logits


def _in_rows(change: Callable[[jax.Array], jax.Array], rows: Bool[Array, "R"], logits: jax.Array) -> jax.Array:
    return jnp.where(rows[:, None], change(logits), logits)


def repeated(
    history: Int[Array, "R L"],
    last: Int[Array, "R"],
    window: Int[Array, "R"],
    breakers: Int[Array, "R words"],
    vocab_size: int,
) -> Int[Array, "R V"]:
    """How many of the last tokens each token has followed before, the longest time; -1 where it never came.

    Only the `window` tokens up to `last` are looked at, no repeat reaches back across a breaker, and none is counted
    beyond LONGEST_REPEAT.

    Worked example: after "a b c a b" the token c has followed 2 of the last tokens, a none, and b none but a.
    """
    count, length = history.shape
    index, at = jnp.arange(count)[:, None], jnp.arange(length)
    first = (last - window + 1)[:, None]
    there = (at >= first) & (at < last[:, None])

    back = jnp.arange(LONGEST_REPEAT)
    tail = jnp.take_along_axis(history, jnp.maximum(last[:, None] - back, 0), axis=1)
    breaks = jnp.take_along_axis(breakers, tail // MASK_BITS, axis=1) >> (tail % MASK_BITS) & 1 == 1
    limit = jnp.where(breaks.any(1), jnp.argmax(breaks, axis=1), LONGEST_REPEAT)[:, None]
    padded = jnp.pad(history, ((0, 0), (LONGEST_REPEAT, 0)), constant_values=-1)

    def going_on(carry: Any) -> jax.Array:
        back, _, same = carry
        return jnp.any(same) & (back < LONGEST_REPEAT)

    def one_further(carry: Any) -> Any:
        back, found, same = carry
        earlier = lax.dynamic_slice_in_dim(padded, LONGEST_REPEAT - back, length, axis=1)
        same &= (earlier == lax.dynamic_slice_in_dim(tail, back, 1, axis=1)) & (at - back >= first) & (back < limit)
        return back + 1, found + same, same

    _, found, _ = lax.while_loop(going_on, one_further, (jnp.int32(0), jnp.zeros_like(history), there))
    follows = jnp.roll(history, -1, axis=1)
    none = jnp.full((count, vocab_size), -1, jnp.int32)
    return none.at[index, follows].max(jnp.where(there, found, -1), mode="drop")


def dry(
    logits: Float[Array, "R V"],
    longest: Int[Array, "R V"],
    multiplier: Float[Array, "R"],
    base: Float[Array, "R"],
    allowed_length: Int[Array, "R"],
) -> Float[Array, "R V"]:
    """`multiplier * base ** (repeat - allowed_length)` off each token that would make a repeat longer.

    DRY ("don't repeat yourself") is by P. E. Weidmann: github.com/oobabooga/text-generation-webui/pull/5677.
    """
    over = longest - allowed_length[:, None]
    penalty = multiplier[:, None] * base[:, None] ** jnp.maximum(over, 0).astype(logits.dtype)
    return logits - jnp.where((longest >= 0) & (over >= 0), jnp.minimum(penalty, MOST_PENALTY), 0)


def top_n_sigma(logits: Float[Array, "R V"], n: Float[Array, "R"]) -> Float[Array, "R V"]:
    """Tokens within `n` standard deviations of the greatest logit (Tang et al. 2024, arXiv:2411.07641)."""
    there = logits > NEGATIVE
    count = there.sum(-1, keepdims=True)
    mean = jnp.where(there, logits, 0).sum(-1, keepdims=True) / count
    variance = jnp.where(there, (logits - mean) ** 2, 0).sum(-1, keepdims=True) / count
    return jnp.where(logits >= logits.max(-1, keepdims=True) - n[:, None] * jnp.sqrt(variance), logits, NEGATIVE)


def typical(logits: Float[Array, "R V"], p: Float[Array, "R"], sums: SoftmaxSums = PLAIN_SUMS) -> Float[Array, "R V"]:
    """The tokens whose information is nearest to the entropy, of more than `p` together (Meister et al. 2022,
    arXiv:2202.00666). Tokens as near as the last one kept are kept.
    """
    log_p = logits - sums.log_sum_exp(logits)[:, None]
    weights = jnp.exp(log_p)
    entropy = -jnp.where(weights > 0, weights * log_p, 0).sum(-1, keepdims=True)
    nearness = -jnp.abs(log_p + entropy)

    def mass(least: jax.Array) -> jax.Array:
        return jnp.where(nearness >= least, weights, 0).sum(-1)

    needed = p * mass(jnp.full_like(entropy, NEGATIVE))
    return jnp.where(nearness >= greatest(lambda least: mass(least) > needed, len(logits)), logits, NEGATIVE)


def xtc(
    logits: Float[Array, "R V"], threshold: Float[Array, "R"], sums: SoftmaxSums = PLAIN_SUMS
) -> Float[Array, "R V"]:
    """Without the tokens of at least this probability, but for the least likely of them.

    XTC ("exclude top choices") is by P. E. Weidmann: github.com/oobabooga/text-generation-webui/pull/6335.
    """
    log_p = logits - sums.log_sum_exp(logits)[:, None]
    above = (log_p >= jnp.log(threshold)[:, None]) & (logits > NEGATIVE)
    least = jnp.where(above, logits, jnp.inf).min(-1, keepdims=True)
    return jnp.where(above & (logits > least), NEGATIVE, logits)


@lru_cache(maxsize=64)
def breaker_mask(tokenizer: Tokenizer, breakers: Sequence[str], vocab_size: int) -> np.ndarray:
    """The tokens in which a breaker stands; of a breaker that stands in none the last that it is spelled with."""
    texts = _token_texts(tokenizer, vocab_size)
    found: set[int] = set()
    for breaker in breakers:
        inside = [token for token, text in enumerate(texts) if breaker in text]
        found.update(inside or tokenizer.encode(breaker, add_special_tokens=False).ids[-1:])
    return mask_of((token for token in found if token < vocab_size), vocab_size)


@lru_cache(maxsize=2)
def _token_texts(tokenizer: Tokenizer, vocab_size: int) -> Sequence[str]:
    texts: list[str] = tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    return texts
