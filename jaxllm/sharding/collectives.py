"""The collectives that model code uses inside `shard_map`; at degree 1 they are the identity."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxllm.sharding.mesh import DATA, EVERY, TENSOR


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


def device_rank() -> jax.Array:
    """This device's place among all: along the tensor axis first."""
    return lax.axis_index(EVERY)


def data_size() -> int:
    """How many batches run side by side, a Python int."""
    return lax.axis_size(DATA)


def gather_over_data(tree: Any) -> Any:
    """Arrays of every batch, one batch after the other along a new first axis: `[n, ...]` becomes `[batches, n, ...]`.

    All arrays travel as bytes in one collective: several that do not wait for each other might begin in another order
    in another process.
    """
    arrays, form = jax.tree.flatten(tree)
    sent = [lax.bitcast_convert_type(a, jnp.uint8).ravel() for a in arrays]
    found = lax.all_gather(jnp.concatenate(sent), DATA)
    parts = jnp.split(found, list(itertools.accumulate(part.size for part in sent))[:-1], axis=1)
    return jax.tree.unflatten(form, [_of_bytes(part, a) for part, a in zip(parts, arrays, strict=True)])


def _of_bytes(part: jax.Array, like: jax.Array) -> jax.Array:
    """`[batches, bytes]` -> as many arrays as `like`."""
    size = like.dtype.itemsize
    shape = (part.shape[0], *like.shape, *([size] if size > 1 else []))
    return lax.bitcast_convert_type(part.reshape(shape), like.dtype)


def share_out_over_data(x: Float[Array, "m ..."]) -> Float[Array, "n ..."]:
    """Add what the devices of the data axis have for the rows of every batch, and keep those of this one."""
    return lax.psum_scatter(x, DATA, scatter_dimension=0, tiled=True) if data_size() > 1 else x


def own_rows(x: Shaped[Array, "m ..."]) -> Shaped[Array, "n ..."]:
    """Of the rows of every batch, one batch after the other, those of this one."""
    count = x.shape[0] // data_size()
    return lax.dynamic_slice_in_dim(x, lax.axis_index(DATA) * count, count)
