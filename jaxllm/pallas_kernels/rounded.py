"""Inputs of a product rounded to int8, which makes it one of integers."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

RUN = 64
"""Inputs that are rounded by one scale. A few of a token's inputs are a hundred times as large as the others, which one
scale for all would round away: that costs SmolLM2 five percent of perplexity, runs of 64 cost one."""


def quantize_runs(x: Float[Array, "T i"]) -> tuple[Int8[Array, "T i"], Float[Array, "T r"]]:
    """The nearest `codes * scale`, a scale for each RUN inputs of a row; a run of zeros has the scale 1."""
    size = x.shape[1]
    runs = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -size % RUN))).reshape(len(x), -1, RUN)
    peak = jnp.abs(runs).max(axis=2)
    scale = jnp.where(peak > 0, peak / 127, 1)
    codes = jnp.round(runs / scale[..., None]).astype(jnp.int8)
    return codes.reshape(len(x), -1)[:, :size], scale
