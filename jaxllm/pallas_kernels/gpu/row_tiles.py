"""Which rows and outputs a program of a product has, on NVIDIA GPUs: of one matrix, or of a tile of a group's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from jaxllm.compat import triton_load, triton_store


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
