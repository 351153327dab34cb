"""Masks of allowed tokens: int32 words `[V/32]`, a bit a token, lowest first; grammars fill and samplers read them."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

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
    """Whether each token's bit is set; inside a traced function."""
    token = jnp.arange(vocab_size)
    found: jax.Array = (masks[:, token // MASK_BITS] >> (token % MASK_BITS) & 1) == 1
    return found
