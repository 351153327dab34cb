"""The collectives that model code uses inside `shard_map`; at degree 1 they are the identity."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxllm.sharding.mesh import TENSOR


def tensor_rank() -> jax.Array:
    """This device's place along the tensor axis."""
    return lax.axis_index(TENSOR)


def tensor_size() -> int:
    """The degree of tensor parallelism, a Python int."""
    return lax.axis_size(TENSOR)


def sum_over_tensor(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add the partial results of every device of the tensor axis."""
    return lax.psum(x, TENSOR) if tensor_size() > 1 else x


def gather_over_tensor(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """Lay the last axes of every device of the tensor axis end to end."""
    return lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True) if tensor_size() > 1 else x
