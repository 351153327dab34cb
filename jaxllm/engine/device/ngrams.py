"""Drafts out of a sequence's own text: what followed the last time that it said what it has just said."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.engine.device.sizes import NgramDrafts


def ngram_drafts(
    history: Int[Array, "S L"], position: Int[Array, "S"], rule: NgramDrafts
) -> tuple[Int[Array, "S K"], Bool[Array, "S"]]:
    """`rule.num_tokens` tokens that may follow the one at `position`, and whether there are any for a sequence.

    They are those behind the longest earlier stretch of text that ends as the sequence does now; of equally long ones
    the last. Where they reach the end of the text they begin again, as a text that repeats itself would.

    Worked example, for drafts of 4: in `5 1 2 3 4 1 2` the end `1 2` stood before `3 4 1 2`, which is what comes back.
    """
    at = jnp.arange(history.shape[1])
    same = at < position[:, None]
    length = jnp.zeros(history.shape, jnp.int32)
    for back in range(rule.longest):
        wanted = jnp.take_along_axis(history, jnp.maximum(position - back, 0)[:, None], axis=1)
        same &= (jnp.roll(history, back, axis=1) == wanted) & (at >= back)
        length += same
    score = jnp.where(length >= rule.shortest, length * history.shape[1] + at, -1)
    end = jnp.argmax(score, axis=1)
    period = jnp.maximum(position - end, 1)
    following = end[:, None] + 1 + jnp.arange(rule.num_tokens) % period[:, None]
    return jnp.take_along_axis(history, following, axis=1), score.max(axis=1) >= 0
