"""The norm in front of a product, as kernels may take it into the same pass, and norms that stand by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Norm = Any
"""Any norm over the last axis: called with `x`, it gives as much. `RootMeanSquare` is the one that kernels know."""


def normalise(
    x: Float[Array, "... n"],
    weight: Float[Array, "*groups n"],
    bias: Float[Array, "n"] | None,
    epsilon: float,
    centred: bool,
) -> Float[Array, "... n"]:
    """`x / sqrt(mean(x^2) + epsilon) * weight + bias`, computed in float32; `centred` takes the mean off `x` first."""
    y = x.astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon) * weight
    return (y if bias is None else y + bias).astype(x.dtype)


class RootMeanSquare(NamedTuple):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""

    weight: jax.Array
    eps: float
    run: Callable[..., jax.Array] = normalise
    """What computes it where it stands by itself: `Kernels.normalise`."""

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.run(x, self.weight, None, self.eps, False)
