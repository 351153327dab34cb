"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and ways of stretching them over longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One kind of rotary embedding.

    Attributes:
        dim: channels of each head that are rotated, the first ones; the others stay as they are.
        interleaved: pairs are neighbours (0, 1), (2, 3), …; otherwise they lie `dim / 2` apart.
        kind: "default", "linear" (all frequencies divided by `factor`), "dynamic" (the base grows with the length),
            "llama3" (long wavelengths divided by `factor`), "yarn" (Peng et al. 2023, arXiv:2309.00071),
            "longrope" (Ding et al. 2024, arXiv:2402.13753: one divisor a frequency, another set for long sequences) or
            "proportional" (all frequencies divided by `factor`, and only the first `pairs` rotate).
        pairs: of "proportional", how many pairs of channels rotate.
        original_length: the context the model was first trained on, in tokens.
        attention_factor: on cosine and sine alike, so squared on the logits.
        divisors: what each frequency is divided by, where a GGUF file spells llama3 scaling out.
        sections: how many frequencies turn with each axis of a token's place in an image: time, height, width. Of
            text all three are its position.
        mixed: the axes take turns, frequency by frequency, until their sections are used up, and time has the rest.
    """

    dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    pairs: int = 0
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    divisors: tuple[float, ...] | None = None
    sections: tuple[int, ...] = ()
    mixed: bool = False

    @property
    def axes(self) -> np.ndarray:
        """The axis that each frequency turns with, by its number."""
        if not self.mixed:
            return np.repeat(np.arange(3), self.sections)
        axes, slot = np.zeros(self.dim // 2, int), np.arange(self.dim // 2)
        for axis in (1, 2):
            axes[(slot % 3 == axis) & (slot < 3 * self.sections[axis])] = axis
        return axes

    @property
    def depends_on_length(self) -> bool:
        """The angles of a position are others in a longer sequence."""
        return self.kind in ("dynamic", "longrope")


def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> np.ndarray:
    """The `dim // 2` angular frequencies in radians a token, float32; `long` is longrope's set for long sequences."""
    freqs = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind in ("linear", "proportional"):
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        rotations = rope.original_length * freqs / (2 * math.pi)
        band = rope.high_freq_factor - rope.low_freq_factor
        kept = rotations - rope.low_freq_factor
        kept = np.clip(kept / band, 0.0, 1.0) if band else np.where(kept >= 0, 1.0, 0.0)
        freqs = (1 - kept) * (freqs / rope.factor) + kept * freqs
    elif rope.kind == "yarn":
        kept = _yarn_kept(rope)
        freqs = (1 - kept) * (freqs / rope.factor) + kept * freqs
    elif rope.kind == "longrope":
        freqs = freqs / np.asarray(rope.long_divisors if long else rope.short_divisors)
    if rope.kind == "proportional":
        freqs[rope.pairs :] = 0
    if rope.divisors is not None:
        freqs = freqs / np.asarray(rope.divisors)
    return freqs.astype(np.float32)


def _yarn_kept(rope: RopeConfig) -> np.ndarray:
    """1 for frequencies that rotate often within the original length, 0 for those that hardly do, a ramp between."""

    def channel(rotations: float) -> float:
        return rope.dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2) - low) / (high - low if high != low else 0.001)
    return 1 - np.clip(ramp, 0.0, 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Angles:
    """Cosine and sine of every token's angles, and how the channels pair up."""

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]
    interleaved: bool = field(default=False, metadata={"static": True})


def rope_angles(
    rope: RopeConfig, positions: Int[Array, "T"], lengths: Int[Array, "T"], places: Int[Array, "3 T"] | None = None
) -> Angles:
    """The angles of tokens at `positions`, float32; with sections at their `places` instead, if these are given.

    `lengths` is how long each token's sequence was taken to be when it was prefilled, or the tokens up to and with this
    one where that is more; only kinds that depend on the length look at it.
    """
    freqs: Any = inverse_frequencies(rope)
    if rope.kind == "longrope":
        freqs = jnp.where((lengths > rope.original_length)[:, None], inverse_frequencies(rope, long=True), freqs)
    elif rope.kind == "dynamic":
        freqs = freqs * _dynamic_shrink(rope, lengths)
    if places is not None and rope.sections:
        angles = places.T[:, rope.axes].astype(jnp.float32) * freqs
    else:
        angles = positions.astype(jnp.float32)[:, None] * freqs
    return Angles(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor, rope.interleaved)


def _dynamic_shrink(rope: RopeConfig, lengths: Int[Array, "T"]) -> Float[Array, "T half"]:
    """The factor on each frequency of a base that grows with the length, by `stretch ** (d / (d - 2))`."""
    longer = jnp.maximum(lengths, rope.original_length).astype(jnp.float32) / rope.original_length
    stretch = rope.factor * longer - (rope.factor - 1)
    powers = np.arange(0, rope.dim, 2) / (rope.dim - 2)
    return stretch[:, None] ** -powers.astype(np.float32)


def rotate(x: Float[Array, "T H D"], angles: Angles | None) -> Float[Array, "T H D"]:
    """Rotate each head's first channels in pairs by the token's angles; without angles there are no positions."""
    if angles is None:
        return x
    cos, sin = angles.cos[:, None, :], angles.sin[:, None, :]
    rotary = 2 * cos.shape[-1]
    y, rest = x[..., :rotary].astype(jnp.float32), x[..., rotary:]
    if angles.interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    else:
        a, b = jnp.split(y, 2, axis=-1)
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([y.astype(x.dtype), rest], axis=-1) if rest.shape[-1] else y.astype(x.dtype)
