"""The product of a layer in plain XLA, with what stands in front of it and behind."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.grouped_matmul import Matrix
from jaxllm.pallas_kernels.norms import Norm


def linear(
    x: Float[Array, "T i"],
    weight: Matrix,
    norm: Norm | None = None,
    residual: Float[Array, "T o"] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T o"]:
    """The weight's own product."""
    out = weight.matmul(x if norm is None else norm(x))
    return (out if residual is None else residual + out.astype(residual.dtype)).astype(dtype)
