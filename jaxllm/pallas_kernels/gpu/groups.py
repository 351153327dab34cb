"""What stands before a grouped product on NVIDIA GPUs: a list of its rows for each group, and tiles of these."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store

BLOCK = 1024
"""Rows that a program looks at together."""


class RowLists(NamedTuple):
    """The rows of each group, in order and with room for as many as there may be, and tiles of one group's rows.

    Worked example, groups [2, 0, 2, 3, 2] of three, at most 4 rows each, tiles of 2:

        rows     [1, _, _, _,  _, _, _, _,  0, 2, 4, _]    group 0's, 1's and 2's; row 3 is nobody's
        tiles    [0, 0, 1], [2, 8, 2], [2, 10, 1]
    """

    rows: Int[Array, "M"]
    tiles: Int[Array, "tiles 3"]
    """(group, its first place in `rows`, rows); those left over have 0 rows."""


def most_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """That so many rows may be cut into."""
    return num_rows // tile_rows + min(num_groups, num_rows)


def list_rows(
    group: Int[Array, "N"], num_groups: int, most: int, tile_rows: int, *, interpret: bool = False
) -> RowLists:
    """The rows of groups that have at most `most` rows each; rows of group `num_groups` are nobody's.

    A program has a group, and looks through all rows for its own.
    """
    num_rows = group.shape[0]
    rows, sizes = pl.pallas_call(
        functools.partial(_list_kernel, num_rows=num_rows, most=most),
        out_shape=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_groups * most, num_groups)),
        grid=(num_groups,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=8, num_stages=2),
        name="list_rows",
    )(group)
    return RowLists(rows, row_tiles(sizes, num_rows, most, tile_rows, interpret=interpret))


def _list_kernel(group_ref: Any, rows_ref: Any, sizes_ref: Any, *, num_rows: int, most: int) -> None:
    group = pl.program_id(0)
    lane = jnp.arange(min(BLOCK, pl.next_power_of_2(num_rows)))

    def body(block: Array, size: Array) -> Array:
        row = block * len(lane) + lane
        mine = triton_load(group_ref.at[row], mask=row < num_rows, other=-1) == group
        count = mine.astype(jnp.int32)
        scatter(rows_ref, group * most + size + jnp.cumsum(count) - count, row, mine)
        return size + jnp.sum(count)

    sizes_ref[group] = lax.fori_loop(0, pl.cdiv(num_rows, len(lane)), body, jnp.int32(0))


def groups_of_rows(lists: RowLists, num_rows: int, tile_rows: int) -> Int[Array, "N"]:
    """The group of each row; 0 for those that have none."""
    group, first, count = lists.tiles.T
    at = jnp.arange(tile_rows)
    row = lists.rows.at[first[:, None] + at].get(mode="clip")
    row = jnp.where(at < count[:, None], row, num_rows)
    return jnp.zeros((num_rows,), jnp.int32).at[row].set(group[:, None], mode="drop")


def row_tiles(
    sizes: Int[Array, "X"], num_rows: int, most: int, tile_rows: int, *, interpret: bool = False
) -> Int[Array, "tiles 3"]:
    """The tiles of `RowLists`, whose groups have so many of `num_rows` rows, at most `most` each."""

    def kernel(sizes_ref: Any, tiles_ref: Any) -> None:
        group = jnp.arange(pl.next_power_of_2(num_groups))
        store_tiles(
            tiles_ref, group, triton_load(sizes_ref.at[group], mask=group < num_groups, other=0), most, tile_rows
        )

    num_groups = sizes.shape[0]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((most_tiles(num_rows, num_groups, tile_rows), 3), jnp.int32),
        grid=(1,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="row_tiles",
    )(sizes)


def store_tiles(tiles_ref: Any, group: Array, sizes: Array, most: int, tile_rows: int) -> None:
    """Cuts the lists of groups, `sizes` long and `most` at most, into tiles: `RowLists.tiles`."""
    counts = lax.div(sizes + tile_rows - 1, tile_rows)
    ends = jnp.cumsum(counts)

    def body(index: Array, carry: Array) -> Array:
        begin, left = index * tile_rows, sizes - index * tile_rows
        tile = jnp.where(left > 0, ends - counts + index, tiles_ref.shape[0])
        for column, values in enumerate((group, group * most + begin, jnp.minimum(left, tile_rows))):
            triton_store(tiles_ref.at[tile, column], values, mask=left > 0)
        return carry

    lax.fori_loop(0, pl.cdiv(most, tile_rows), body, 0)
    tile = jnp.arange(pl.next_power_of_2(tiles_ref.shape[0]))
    unused = (tile >= jnp.sum(counts)) & (tile < tiles_ref.shape[0])
    triton_store(tiles_ref.at[tile, 2], jnp.zeros_like(tile), mask=unused)


def scatter(ref: Any, at: Array, values: Array, mask: Array) -> None:
    """Stores values at places of a vector, those of the mask at different ones.

    The others are sent outside: an interpreted store writes back what it read there, over what belongs there.
    """
    triton_store(ref.at[jnp.where(mask, at, ref.shape[0])], values, mask=mask)
