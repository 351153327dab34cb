"""Rows of products on NVIDIA GPUs: each group's list of its own and tiles of these, and what a kernel's program has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

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


def given_lists(lists: RowLists | None) -> tuple[jax.Array, ...]:
    """What a kernel whose program asks for `rows_of_program` is given first."""
    return () if lists is None else (lists.tiles, lists.rows)


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


class ProgramRows(NamedTuple):
    """A program's rows.

    Attributes:
        group: whose matrix they are multiplied by.
        there: how many of them there are, or 1 where that is not counted; the rest of a tile is not `live`.
        row: their places in the output, and beyond it of those that are not live.
        part: of the output, which has a part for each of several programs that walk some of the inputs.
        steps: the first of theirs, and the end.
    """

    group: Array | int
    there: Array | int
    row: Int[Array, "n"]
    live: Bool[Array, "n"]
    part: Array | int
    steps: tuple[Array | int, Array | int]


def rows_of_program(
    list_refs: Sequence[Any], out_ref: Any, num_rows: int, size: int, steps: int, *, second: Array
) -> ProgramRows:
    """Of the tile `second` of `RowLists` (tiles and rows), or without such of the rows or the part `second`.

    `size` rows lie in a tile. The output `[parts, N, o]` has several parts where rows are one tile.
    """
    of_tile = jnp.arange(size)
    if list_refs:
        tiles_ref, rows_ref = list_refs
        group, first, count = (tiles_ref[second, column] for column in range(3))
        live = of_tile < count
        row = triton_load(rows_ref.at[first + of_tile], mask=live, other=num_rows)
        return ProgramRows(group, count, row, live, 0, (0, steps))
    parts = out_ref.shape[0]
    if parts == 1:
        row = second * size + of_tile
        return ProgramRows(0, 1, row, row < num_rows, 0, (0, steps))
    each = pl.cdiv(steps, parts)
    ends = second * each, jnp.minimum((second + 1) * each, steps)
    return ProgramRows(0, 1, of_tile, of_tile < num_rows, second, ends)


class ProgramOutputs(NamedTuple):
    """A program's outputs: `lane` numbers them; `output` is which of a matrix's rows each is, 0 where there is none."""

    lane: Int[Array, "n"]
    inside: Bool[Array, "n"]
    output: Int[Array, "n"]


def outputs_of_program(block: Array, size: int, outputs: int, *, gated: bool) -> ProgramOutputs:
    """Where they are gated, a gate's output and the one that it is for are neighbours."""
    lane = block * size + jnp.arange(size)
    inside = lane < outputs
    output = lax.rem(lane, 2) * (outputs // 2) + lax.div(lane, 2) if gated else lane
    return ProgramOutputs(lane, inside, jnp.where(inside, output, 0))


def store_sums(
    out_ref: Any, sums: Float[Array, "a b"], block: Array, outputs: ProgramOutputs, rows: ProgramRows,
    activation: Callable[[jax.Array], jax.Array] | None, *, axis: int = 0,
) -> None:  # fmt: skip
    """Writes sums, or `activation(gate) * up` of neighbouring ones, where they belong; outputs lie along an axis."""
    place, there = outputs.lane, outputs.inside
    if activation is not None:
        gate, up = neighbours(sums, axis)
        sums = activation(gate) * up
        place = block * sums.shape[axis] + jnp.arange(sums.shape[axis])
        there = place < out_ref.shape[2]
    row, live, place, there = (
        jnp.expand_dims(vector, at)
        for vector, at in zip((rows.row, rows.live, place, there), (axis, axis, 1 - axis, 1 - axis), strict=True)
    )
    triton_store(out_ref.at[rows.part, row, place], sums.astype(out_ref.dtype), mask=live & there)


def neighbours(x: Float[Array, "n m"], axis: int) -> tuple[Array, Array]:
    """The even and the odd rows (axis 0) or columns (1)."""
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    even = jnp.expand_dims(jnp.arange(2) == 0, (0, 2) if axis == 0 else (0, 1))
    return jnp.sum(jnp.where(even, pairs, 0), axis=axis + 1), jnp.sum(jnp.where(even, 0, pairs), axis=axis + 1)
