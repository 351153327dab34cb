"""The norm in front of a product, as kernels may take it into the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Norm = Any
"""Any norm over the last axis: called with `x`, it gives as much. `RootMeanSquare` is the one that kernels know."""


class RootMeanSquare(NamedTuple):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""

    weight: jax.Array
    eps: float

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight).astype(x.dtype)
