"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the half-split form that checkpoints of HF use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class RopeConfig:
    """One kind of rotary embedding.

    Attributes:
        kind: "default", "linear" (positions divided by `factor`) or "llama3" (long wavelengths divided by it).
        low_freq_factor, high_freq_factor, original_length: llama3's bounds between slow and fast wavelengths.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    divisors: tuple[float, ...] | None = None
    """What each frequency is divided by, where a GGUF file spells llama3 scaling out (`rope_freqs.weight`)."""

    @classmethod
    def from_hf(cls, theta: float, scaling: dict | None) -> RopeConfig:
        """From `rope_theta` and `rope_scaling`, or from a `rope_parameters` entry, old and new spellings alike."""
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise CheckpointError(f"rope_scaling type is {kind!r}; supported are default, linear and llama3")
        return cls(
            theta=float(scaling.get("rope_theta", theta)),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_length=int(scaling.get("original_max_position_embeddings", 8192)),
        )

    @classmethod
    def from_gguf(
        cls, metadata: dict[str, Any], architecture: str, checkpoint: Checkpoint, default_theta: float = 10_000.0
    ) -> RopeConfig:
        """From a GGUF file's `ARCH.rope.*` keys and its `rope_freqs.weight` tensor, where it has one."""
        kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise CheckpointError(f"{architecture}.rope.scaling.type is {kind!r}; supported are none and linear")
        divisors = None
        if "rope_freqs.weight" in checkpoint.tensors:
            divisors = tuple(float(x) for x in checkpoint.read("rope_freqs.weight"))
        return cls(
            theta=float(metadata.get(f"{architecture}.rope.freq_base", default_theta)),
            kind="linear" if kind == "linear" else "default",
            factor=float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0)),
            divisors=divisors,
        )


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """The `dim // 2` angular frequencies in radians a token, float32."""
    freqs = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / freqs
        turns = rope.original_length / wavelength
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        freqs = (1 - smooth) * freqs / rope.factor + smooth * freqs
    if rope.divisors is not None:
        freqs = freqs / np.asarray(rope.divisors)
    return freqs.astype(np.float32)


Angles = tuple[Float[Array, "T half"], Float[Array, "T half"]]
"""Cosine and sine of every token's angles."""


def rope_angles(rope: RopeConfig, dim: int, positions: Int[Array, "T"]) -> Angles:
    """Cosine and sine for `positions`, float32."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "T H D"], angles: Angles) -> Float[Array, "T H D"]:
    """Turn the pairs `(x[i], x[i + D/2])` of every head by the token's angles."""
    cos, sin = (a[:, None, :] for a in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
