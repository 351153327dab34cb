"""Grouped matmul: rows sorted by group, each multiplied by its own group's weight (the experts of an MoE layer).

`(x [N, i], weights [X, o, i], group_sizes [X]) -> [N, o]`: `x[r] @ weight[g].T` for every row `r`, where `g` is the
row's group; accumulated and returned in float32.

Worked example: with `group_sizes` [2, 0, 1] and N = 5, rows 0 and 1 are group 0's, row 2 is group 2's, and rows 3 and 4
are nobody's: they come out zero, whatever they hold.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MIN_TILE, MAX_TILE = 2, 64
"""Fewest and most rows that are multiplied at a time: XLA:CPU leaves its fast path for a single row."""


@runtime_checkable
class Matrix(Protocol):
    """What kernels ask of a weight: a matrix `[o, i]`, or a stack of them; see `quantization.weight`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def matmul(self, x: jax.Array) -> jax.Array: ...

    def select(self, index: jax.Array) -> Matrix: ...

    def dequantize(self) -> jax.Array: ...


def sort_by_group(group: Int[Array, "N"], num_groups: int) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, "X"]]:
    """The rows in the order of their groups, each row's place in that order, and how many rows each group has.

    Rows whose group is `num_groups` are nobody's and come last.

    Worked example: groups [2, 0, 1, 0] of two  ->  [1, 3, 2, 0], [3, 0, 2, 1], [2, 1]
    """
    order = jnp.argsort(group, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    return order, place, jnp.bincount(group, length=num_groups)


def tiles(x: Float[Array, "N i"], weight: Matrix, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """Group by group, a tile of rows at a time: reads the weights of groups that have rows, once, and no others."""
    num_rows, (num_groups, out_features, _) = x.shape[0], weight.shape
    tile = _tile_rows(num_rows, num_groups)
    ends = jnp.cumsum(group_sizes)
    used = jnp.cumsum(group_sizes > 0)

    def group_body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(used <= i)  # the i-th group that has rows
        size, end = group_sizes[group], ends[group]
        matrix = weight.select(group)

        def tile_body(j: jax.Array, out: jax.Array) -> jax.Array:
            begin = end - size + j * tile
            at = jnp.minimum(begin, num_rows - tile)
            product = matrix.matmul(lax.dynamic_slice_in_dim(x, at, tile))
            row = at + jnp.arange(tile)
            mine = (row >= begin) & (row < end)
            merged = jnp.where(mine[:, None], product, lax.dynamic_slice_in_dim(out, at, tile))
            return lax.dynamic_update_slice_in_dim(out, merged, at, 0)

        return lax.fori_loop(0, (size + tile - 1) // tile, tile_body, out)

    return lax.fori_loop(0, used[-1], group_body, jnp.zeros((num_rows, out_features), jnp.float32))


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Rows multiplied at a time: the power of two that holds an average group, within `MIN_TILE` … `MAX_TILE`."""
    average = -(-num_rows // num_groups)
    return min(max(MIN_TILE, min(MAX_TILE, 1 << (average - 1).bit_length())), num_rows)


def ragged_dot(x: Float[Array, "N i"], weight: Matrix, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """The compiler's own, where it has one that does not multiply every row by every weight."""
    matrices = weight.dequantize()
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    out = lax.ragged_dot_general(
        x.astype(matrices.dtype),
        matrices,
        group_sizes,
        numbers,
        precision=lax.Precision.HIGHEST if matrices.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    grouped = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(grouped[:, None], out, 0)
