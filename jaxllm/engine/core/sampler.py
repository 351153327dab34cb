"""Sampling on the device: from logits to tokens and log-probabilities.

Nothing here sorts the vocabulary. The most likely `TOP` tokens come from the groups with the greatest maxima; they
settle top-k and top-p in nearly every case, and where they don't, a bisection over the bits of the threshold does. A
token is drawn by inverting the cumulative distribution at one uniform number, which depends on nothing but the
request's seed and the token's position: so neither batch-mates nor preemption change what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.engine.core.feature import Fields, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.slots import Slots, settings
from jaxllm.models.predictor import Head
from jaxllm.pallas_kernels.products import PLAIN_SUMS, SoftmaxSums
from jaxllm.requests.sampling import LOGPROBS_MODES, MAX_LOGPROBS

MASK_BITS = 32
"""Tokens in one word of a mask."""
ALL = -1
"""A word that allows all of its tokens."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // MASK_BITS)


def mask_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """A mask [V/32] that allows `tokens` and no others."""
    bits = np.zeros(mask_words(vocab_size) * MASK_BITS, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def allow(mask: np.ndarray, token: int) -> None:
    """Let a mask [V/32] allow one token more."""
    word, bit = divmod(token, MASK_BITS)
    mask.view(np.uint32)[word] |= np.uint32(1 << bit)


def forbid(mask: np.ndarray, token: int) -> None:
    """Let a mask [V/32] no longer allow a token."""
    word, bit = divmod(token, MASK_BITS)
    mask.view(np.uint32)[word] &= ~np.uint32(1 << bit)


def allow_only(mask: np.ndarray, token: int) -> None:
    """Let a mask [V/32] allow one token and no other."""
    mask[:] = 0
    allow(mask, token)


def allowed(masks: Int[Array, "R words"], vocab_size: int) -> Bool[Array, "R V"]:
    """Each token's bit, as a bool; inside a traced function."""
    token = jnp.arange(vocab_size)
    found: jax.Array = (masks[:, token // MASK_BITS] >> (token % MASK_BITS) & 1) == 1
    return found


GROUP = 64
"""Tokens in a group when looking for the most likely ones."""
TOP = 64
"""The number of most likely tokens that are found exactly."""
DRAW_BLOCK = 256
"""Tokens whose probabilities are added up before choosing among them."""

NO_WEIGHT = 87.0
"""How far below the greatest logit others are so that they add nothing: exp(-87) is nearly the smallest float32."""

NEGATIVE = float("-inf")

PROCESSED = 1 + LOGPROBS_MODES.index("processed_logprobs")
LOGITS = LOGPROBS_MODES.index("raw_logits")
"""Modes above this one give logits: as many as there are of probabilities, in the same order."""


class SamplingRows(NamedTuple):
    """The settings that `R` rows of logits are sampled with."""

    slot: Int[Array, "R"]
    position: Int[Array, "R"]
    """Position of the token that the logits follow."""
    top_k: Int[Array, "R"]
    """0 keeps all."""
    seed: Int[Array, "R 2"]
    prompt_len: Int[Array, "R"]
    logprobs: Int[Array, "R"]
    """Where log-probabilities are asked for, which kind: its place in LOGPROBS_MODES, from 1; else 0."""
    asked_ids: Int[Array, "R 20"]
    """Tokens whose log-probabilities take the place of the last of the most likely ones'; -1 before them."""
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    uses: Int[Array, "R"]
    """A bit for each feature that the row's request uses."""


class Logprobs(NamedTuple):
    """Natural-log probabilities of the raw distribution, or what else the row's mode says."""

    chosen: Float[Array, "R"]
    rank: Int[Array, "R"]
    """1-based."""
    top: Float[Array, "R 20"]
    """Of the most likely tokens, or of those that the row asks for; minus infinity where there are fewer."""
    top_ids: Int[Array, "R 20"]


def greedy(logits: Float[Array, "R V"]) -> Int[Array, "R"]:
    """The most likely token of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "R V"], changed: Float[Array, "R V"], rows: SamplingRows, sums: SoftmaxSums = PLAIN_SUMS
) -> tuple[Int[Array, "R"], Logprobs]:
    """A token for each row out of the `changed` logits, and where it is asked for its log-probability, by default that
    of the raw ones.

    Work that no row needs is skipped at run time.
    """
    best = greedy(changed)
    random = rows.temperature > 0
    drawn = lax.cond(jnp.any(random), partial(_draw_tokens, sums), lambda *_: best, changed, rows)
    tokens = jnp.where(random, drawn, best)
    found = partial(_logprobs_by_mode, sums)
    logprobs = lax.cond(jnp.any(rows.logprobs > 0), found, _no_logprobs, logits, changed, tokens, rows)
    return tokens, logprobs


def apply_mask(logits: Float[Array, "R V"], mask: Int[Array, "R -(-V//32)"]) -> Float[Array, "R V"]:
    """Minus infinity for every token whose bit is not set."""
    return jnp.where(allowed(mask, logits.shape[1]), logits, NEGATIVE)


def _logprobs_by_mode(
    sums: SoftmaxSums,
    logits: Float[Array, "R V"],
    changed: Float[Array, "R V"],
    tokens: Int[Array, "R"],
    rows: SamplingRows,
) -> Logprobs:
    """Of raw logits, or of those that the row's token is chosen by."""
    processed = (rows.logprobs == PROCESSED) | (rows.logprobs == PROCESSED + LOGITS)

    def mixed() -> jax.Array:
        chosen_by = jnp.where((rows.temperature > 0)[:, None], _scaled(sums, changed, rows), changed)
        return jnp.where(processed[:, None], chosen_by, logits)

    shown = lax.cond(jnp.any(processed), mixed, lambda: logits)
    return row_logprobs(sums, shown, tokens, rows.asked_ids, rows.logprobs > LOGITS)


def _draw_tokens(sums: SoftmaxSums, logits: Float[Array, "R V"], rows: SamplingRows) -> Int[Array, "R"]:
    return draw(_scaled(sums, logits, rows), uniform(rows.seed, rows.position), sums)


def _scaled(sums: SoftmaxSums, logits: Float[Array, "R V"], rows: SamplingRows) -> Float[Array, "R V"]:
    """Logits by temperature and truncation."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    truncated = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    cut = partial(truncate, sums=sums)
    found: jax.Array = lax.cond(jnp.any(truncated), cut, lambda x, *_: x, scaled, rows.top_k, rows.top_p, rows.min_p)
    return found


def uniform(seed: Int[Array, "R 2"], position: Int[Array, "R"]) -> Float[Array, "R"]:
    """One number in [0, 1) a row, from its seed and position alone (Threefry, Salmon et al. 2011)."""

    def one(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(words, jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, at))

    return jax.vmap(one)(seed, position)


def truncate(
    logits: Float[Array, "R V"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
    min_p: Float[Array, "R"],
    sums: SoftmaxSums = PLAIN_SUMS,
) -> Float[Array, "R V"]:
    """Logits with everything outside min_p, then top_k, then top_p of what is left, at minus infinity.

    Tokens as likely as the last one kept are kept.
    """
    most = logits.max(-1)
    logits = jnp.where(logits >= (most + jnp.log(min_p))[:, None], logits, NEGATIVE)
    values, _ = top_tokens(logits)
    count = jnp.where((top_k > 0) & (top_k < logits.shape[1]), top_k, logits.shape[1])

    # With top_k inside the values found, everything is decided by them.
    within = count <= values.shape[1]
    kth = jnp.take_along_axis(values, jnp.minimum(count, values.shape[1])[:, None] - 1, axis=1)
    least = jnp.where(within, kth[:, 0], NEGATIVE)
    mass = sums.mass(logits, most, least)
    reached = sums.running(values, most, least, 1) >= (top_p * mass)[:, None]
    last = jnp.where(reached.any(1), jnp.argmax(reached, axis=1), values.shape[1] - 1)
    nucleus = jnp.take_along_axis(values, last[:, None], axis=1)
    threshold = jnp.where((top_p < 1)[:, None], nucleus, jnp.where(within[:, None], kth, NEGATIVE))

    open_k = ~within & (count < logits.shape[1])
    open_p = (top_p < 1) & ~reached.any(1)
    open_p |= (top_p < 1) & open_k  # top_p of a top_k that is not known yet
    undecided = open_k | open_p
    threshold = lax.cond(
        jnp.any(undecided),
        lambda: jnp.where(undecided[:, None], _bisect(logits, count, top_p, most, sums), threshold),
        lambda: threshold,
    )
    return jnp.where(logits >= threshold, logits, NEGATIVE)


def _bisect(
    logits: Float[Array, "R V"],
    count: Int[Array, "R"],
    top_p: Float[Array, "R"],
    most: Float[Array, "R"],
    sums: SoftmaxSums,
) -> Float[Array, "R 1"]:
    """The threshold of top_k, then of top_p within it, bit by bit: 64 passes over the logits."""
    kth = greatest(lambda t: (logits >= t).sum(-1) >= count, logits.shape[0])
    needed = top_p * sums.mass(logits, most, kth[:, 0])
    nucleus = greatest(lambda t: sums.mass(logits, most, jnp.maximum(t, kth)[:, 0]) >= needed, logits.shape[0])
    return jnp.where((top_p < 1)[:, None], jnp.maximum(nucleus, kth), kth)


def greatest(holds: object, rows: int) -> Float[Array, "R 1"]:
    """The greatest float32 a row for which `holds`, which is true of minus infinity and false from some value on.

    Floats are searched in the order of their bits: with the sign bit turned over (and, below zero, every other bit
    too) unsigned integers are in the order of the floats they stand for.
    """

    def value(code: jax.Array) -> jax.Array:
        positive = code >> 31 == 1
        bits = jnp.where(positive, code ^ jnp.uint32(1 << 31), ~code)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def body(i: jax.Array, code: jax.Array) -> jax.Array:
        trial = code | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        candidate = value(trial)
        usable = ~jnp.isnan(candidate)
        below = jnp.isnan(candidate) & (trial >> 31 == 0)  # codes under minus infinity's: all true
        good = below | (usable & holds(candidate[:, None]))  # type: ignore[operator]
        return jnp.where(good, trial, code)

    return value(lax.fori_loop(0, 32, body, jnp.zeros(rows, jnp.uint32)))[:, None]


def top_tokens(x: Float[Array, "R V"], count: int = TOP) -> tuple[Float[Array, "R n"], Int[Array, "R n"]]:
    """The `count` greatest values of each row and their ids, best first, exactly.

    Each of them lies in one of the `count` groups with the greatest maxima, so only those groups are looked into.
    """
    num_rows, vocab = x.shape
    if vocab <= GROUP * count:
        values, ids = lax.top_k(x, min(count, vocab))
        return values, ids
    groups = jnp.pad(x, ((0, 0), (0, -vocab % GROUP)), constant_values=NEGATIVE).reshape(num_rows, -1, GROUP)
    _, chosen = lax.top_k(groups.max(-1), count)
    chosen = jnp.sort(chosen, axis=1)  # ties then go to the lower id, as in a top_k of the whole row
    values = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(num_rows, -1)
    values, at = lax.top_k(values, count)
    return values, jnp.take_along_axis(chosen, at // GROUP, axis=1) * GROUP + at % GROUP


def draw(logits: Float[Array, "R V"], u: Float[Array, "R"], sums: SoftmaxSums = PLAIN_SUMS) -> Int[Array, "R"]:
    """The token at which the cumulative distribution of `softmax(logits)` passes `u`."""
    num_rows, vocab = logits.shape
    most, all_of_them = logits.max(-1), jnp.full(num_rows, NEGATIVE)
    least = (most - NO_WEIGHT)[:, None]
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % DRAW_BLOCK)), constant_values=NEGATIVE)
    blocks = blocks.reshape(num_rows, -1, DRAW_BLOCK)
    ends = sums.running(logits, most, all_of_them, DRAW_BLOCK)
    target = u * ends[:, -1]
    block = _first_past(ends, blocks.max(-1) > least, target)
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    within = sums.running(inside, most, all_of_them, 1)
    token = _first_past(within, inside > least, target - start)
    return (block * DRAW_BLOCK + token).astype(jnp.int32)


def _first_past(ends: Float[Array, "R n"], adds: Bool[Array, "R n"], target: Float[Array, "R"]) -> Int[Array, "R"]:
    """The first index that `adds` anything and whose running sum is above `target`; if rounding leaves none, the last.

    `ends` alone would not tell: a running sum is rounded, and may grow where nothing was added.
    """
    past = (ends > target[:, None]) & adds
    last = ends.shape[1] - 1 - jnp.argmax(adds[:, ::-1], axis=1)
    return jnp.where(past.any(1), jnp.argmax(past, axis=1), last)


def token_logprobs(
    logits: Float[Array, "R V"],
    tokens: Int[Array, "R"],
    sums: SoftmaxSums = PLAIN_SUMS,
    count: int = MAX_LOGPROBS,
    norm: Float[Array, "R"] | None = None,
) -> Logprobs:
    """Log-probabilities of `tokens` and of the `count` most likely ones; or logits less `norm`."""
    norm = sums.log_sum_exp(logits) if norm is None else norm
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    top, ids = top_tokens(logits, count) if count else (logits[:, :0], jnp.zeros((len(logits), 0), jnp.int32))
    rank = (logits > chosen).sum(-1) + 1
    pad = ((0, 0), (0, count - top.shape[1]))
    top = jnp.pad(top - norm[:, None], pad, constant_values=NEGATIVE)
    return Logprobs(chosen[:, 0] - norm, rank.astype(jnp.int32), top, jnp.pad(ids.astype(jnp.int32), pad))


def row_logprobs(
    sums: SoftmaxSums,
    logits: Float[Array, "R V"],
    tokens: Int[Array, "R"],
    asked: Int[Array, "R 20"],
    raw: Bool[Array, "R"] | None = None,
) -> Logprobs:
    """Log-probabilities of `tokens`, of the most likely ones, and of those that a row asks for; logits if it is `raw`.

    With asked [-1, …, -1, 7, 9] the first 18 are of the most likely tokens, and the last two of 7 and 9.
    """
    norm = sums.log_sum_exp(logits)
    norm = norm if raw is None else jnp.where(raw, 0, norm)
    found = token_logprobs(logits, tokens, sums, norm=norm)
    values = jnp.take_along_axis(logits, jnp.maximum(asked, 0), axis=1) - norm[:, None]
    top, ids = jnp.where(asked >= 0, values, found.top), jnp.where(asked >= 0, asked, found.top_ids)
    return found._replace(top=top, top_ids=ids)


def _no_logprobs(
    logits: Float[Array, "R V"], changed: Float[Array, "R V"], tokens: Int[Array, "R"], of: SamplingRows
) -> Logprobs:
    rows = logits.shape[0]
    top = jnp.zeros((rows, MAX_LOGPROBS))
    return Logprobs(jnp.zeros(rows), jnp.zeros(rows, jnp.int32), top, top.astype(jnp.int32))


class Settled(NamedTuple):
    """The outcome of the tokens that a step tried ahead with each of its sequences."""

    drafted: Int[Array, "S"]
    """The number that was tried."""
    taken: Int[Array, "S"]
    """The number of them, from the first on, that were the model's choice."""


class Sampled(NamedTuple):
    """What a step hands to the host. `logprobs` is None in the argmax variant, `settled` where none are tried ahead."""

    tokens: jax.Array
    logprobs: Logprobs | None
    settled: Settled | None = None


def choose(
    model: Head, hidden: jax.Array, x: Fields, slots: Slots, variant: Variant, hands: Sequence[Traced]
) -> tuple[Slots, Sampled]:
    """Sample a token after each row of `hidden` [R, E], and leave it where the next step will look for it.

    `x` has the slot and the position of each row, and what features were sent of it. Logits pass the `hands` first.
    """
    if "sampled" in variant:
        asked = settings(slots, x["slot"]) | {"slot": x["slot"], "position": x["position"]}
        rows = SamplingRows(**{name: asked[name] for name in SamplingRows._fields})
        logits = model.logits(hidden)
        changed = logits
        for hand in hands:
            changed = hand.logits(changed, rows, slots, x)
        tokens, logprobs = sample(logits, changed, rows, model.kernels.sums)
    else:
        found, logprobs = model.most_likely(hidden), None
        tokens = greedy(model.logits(hidden)) if found is None else found
    history = slots.history.at[x["slot"], x["position"] + 1].set(tokens)
    return slots._replace(history=history), Sampled(tokens, logprobs)
