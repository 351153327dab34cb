"""What stands before a grouped product on NVIDIA GPUs: rows in the order of their groups, and tiles of them.

A row's place is the number of rows that come before it, which each program counts for its own rows: one kernel in place
of a sort's many. That is quadratic in the rows, and still a few microseconds for the 2,048 of a decode step, some tens
for the 16,384 of a large prefill.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store

BLOCK = 64
"""Rows, groups or tiles that a program has, and rows that it looks at at a time."""
TILES = 16


def sort_by_group(
    group: Int[Array, "N"], num_groups: int, *, interpret: bool = False
) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, "X"]]:
    """See `grouped_matmul.sort_by_group`."""
    rows = group.shape[0]
    shape = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return pl.pallas_call(
        functools.partial(_sort_kernel, rows=rows, num_groups=num_groups),
        out_shape=(shape, shape, jax.ShapeDtypeStruct((num_groups,), jnp.int32)),
        grid=(pl.cdiv(rows, BLOCK) + pl.cdiv(num_groups, BLOCK),),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=2),
        name="sort_by_group",
    )(group)


def _sort_kernel(group_ref: Any, order_ref: Any, place_ref: Any, sizes_ref: Any, *, rows: int, num_groups: int) -> None:
    program, of_rows = pl.program_id(0), pl.cdiv(rows, BLOCK)
    lane = jnp.arange(BLOCK)

    def count(before: Any) -> Array:
        """Of how many rows `before(their groups, their numbers)` holds, for each of the program's own."""

        def body(index: Array, found: Array) -> Array:
            other = index * BLOCK + lane
            groups = triton_load(group_ref.at[other], mask=other < rows, other=num_groups + 1)
            return found + jnp.sum(before(groups[None, :], other[None, :]).astype(jnp.int32), axis=1)

        return lax.fori_loop(0, of_rows, body, jnp.zeros((BLOCK,), jnp.int32))

    @pl.when(program < of_rows)
    def _() -> None:
        row = program * BLOCK + lane
        mine = triton_load(group_ref.at[row], mask=row < rows, other=num_groups)
        place = count(
            lambda groups, other: (groups < mine[:, None]) | ((groups == mine[:, None]) & (other < row[:, None]))
        )
        triton_store(place_ref.at[row], place, mask=row < rows)
        triton_store(order_ref.at[place], row, mask=row < rows)

    @pl.when(program >= of_rows)
    def _() -> None:
        group = (program - of_rows) * BLOCK + lane
        triton_store(sizes_ref.at[group], count(lambda groups, _: groups == group[:, None]), mask=group < num_groups)


def row_tiles(
    group_sizes: Int[Array, "X"], num_rows: int, tile_rows: int, *, interpret: bool = False
) -> Int[Array, "tiles 3"]:
    """Cuts rows into tiles of one group: (group, first row, rows). Tiles left over have 0 rows.

    Rows behind the groups' are of group `X`, which is nobody.

    Worked example, tiles of 16, 24 rows: sizes [3, 0, 20]  ->  [0, 0, 3], [2, 3, 16], [2, 19, 4], [3, 23, 1]
    """
    num_groups = group_sizes.shape[0]
    count = num_rows // tile_rows + min(num_groups + 1, num_rows)
    return pl.pallas_call(
        functools.partial(_tiles_kernel, num_groups=num_groups, num_rows=num_rows, tile_rows=tile_rows, count=count),
        out_shape=jax.ShapeDtypeStruct((count, 3), jnp.int32),
        grid=(pl.cdiv(count, TILES),),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="row_tiles",
    )(group_sizes)


def _tiles_kernel(
    sizes_ref: Any, tiles_ref: Any, *, num_groups: int, num_rows: int, tile_rows: int, count: int
) -> None:
    group = jnp.arange(pl.next_power_of_2(num_groups + 1))
    size = triton_load(sizes_ref.at[group], mask=group < num_groups, other=0)
    size = jnp.where(group == num_groups, num_rows - jnp.sum(size), size)
    tiles = lax.div(size + tile_rows - 1, tile_rows)
    tile = pl.program_id(0) * TILES + jnp.arange(TILES)
    tile_ends = jnp.cumsum(tiles)
    owner = jnp.sum((tile_ends[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    before, own = group[None, :] < owner[:, None], group[None, :] == owner[:, None]

    def total(values: Array, chosen: Array) -> Array:
        return jnp.sum(jnp.where(chosen, values[None, :], 0), axis=1)

    offset = (tile - total(tiles, before)) * tile_rows
    rows = jnp.clip(total(size, own) - offset, 0, tile_rows)
    for column, values in enumerate((owner, total(size, before) + offset, rows)):
        triton_store(tiles_ref.at[tile, column], values, mask=tile < count)
