"""Products of few rows with weights of a few bits in tiles, on NVIDIA GPUs: each byte is read once.

One program per (some tiles of outputs, part of the inputs). A program walks its inputs a step at a time while the next
ones are loaded, expands codes in registers to small integers, which 16-bit floats hold exactly, and multiplies them by
tensor cores. Sums of a group are multiplied by its scale afterwards, in float32: that is one operation for each row
where scaling weights would be one for each weight, and rounds nothing. The parts of long rows are walked side by side,
and their sums joined by one more kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.expand import expand, multiply_add
from jaxllm.pallas_kernels.packed_matrix import ROWS, SCALES, PackedMatrix, block_scale, group_scale

MOST_ROWS = 16


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into programs.

    Attributes:
        warps: of a program, each with 16 outputs of a tile.
        tiles: of `16 * warps` outputs, that a program walks at once.
        step: inputs that are loaded at a time, if rows are whole ones of it.
        stages: steps that are on their way.
        programs: rows are parted until there are that many, as far as parts have `least` inputs.
        ahead: whether the scales of a step are loaded during the one before.
    """

    warps: int = 1
    tiles: int = 4
    step: int = 256
    stages: int = 3
    programs: int = 1024
    least: int = 1024
    ahead: bool = True


TILING = Tiling()


def few_rows(
    x: Float[Array, "T i"], matrix: PackedMatrix, *, tiling: Tiling = TILING, interpret: bool = False
) -> Float[Array, "T o"]:
    """`x @ matrix.T` in float32, of at most MOST_ROWS rows."""
    outputs, inputs = matrix.shape
    step = _step(inputs, matrix, tiling.step)
    blocks, steps = pl.cdiv(outputs, ROWS * tiling.warps * tiling.tiles), inputs // step
    parts = max(1, min(tiling.programs // blocks, inputs // tiling.least, steps))
    given = [array for array in (matrix.low, matrix.high, matrix.words, *matrix.halves) if array is not None]
    sums = pl.pallas_call(
        functools.partial(
            _kernel, matrix=jax.tree.map(lambda _: None, matrix), has_high=matrix.high is not None,
            has_words=matrix.words is not None, tiling=tiling, step=step, steps=pl.cdiv(steps, parts), plain=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((parts, x.shape[0], outputs), jnp.float32),
        grid=(blocks, parts),
        interpret=interpret,
        compiler_params=triton_compiler_params(tiling.warps, tiling.stages),
        name="packed_few_rows",
    )(x.astype(matrix.dtype), *given)  # fmt: skip
    return sums[0] if parts == 1 else jnp.sum(sums, axis=0)


def _step(inputs: int, matrix: PackedMatrix, wanted: int) -> int:
    """The largest that divides rows into whole ones, of whole units, and is no larger than is wanted if that can be."""
    unit = matrix.format.unit
    return next((unit * n for n in range(max(1, wanted // unit), 0, -1) if inputs % (unit * n) == 0), unit)


def _kernel(
    x_ref: Any, *refs: Any, matrix: PackedMatrix, has_high: bool, has_words: bool, tiling: Tiling, step: int,
    steps: int, plain: bool,
) -> None:  # fmt: skip
    *given, out_ref = refs
    low_ref = given.pop(0)
    high_ref = given.pop(0) if has_high else None
    words_ref = given.pop(0) if has_words else None
    format, kind = matrix.format, SCALES[matrix.format.scales]
    block, part = pl.program_id(0), pl.program_id(1)
    most = x_ref.shape[1] // step
    outputs = ROWS * tiling.warps
    of_tile = jnp.arange(outputs)
    groups_of_rows = low_ref.shape[0]
    places = [
        jnp.minimum((block * tiling.tiles + index) * tiling.warps + lax.div(of_tile, ROWS), groups_of_rows - 1)
        for index in range(tiling.tiles)
    ]
    lane = lax.rem(of_tile, ROWS)
    row_count = 8 if x_ref.shape[0] <= 8 else MOST_ROWS
    row = jnp.arange(row_count)
    live = row < x_ref.shape[0]
    byte = jnp.arange(format.width)
    blocks = step // format.block

    def load_scales(index: Array) -> tuple[tuple[Array, ...], ...]:
        """For each tile: all words, then all halves, of each block of a step."""
        at = index * blocks
        return tuple(
            tuple(
                ref
                for number in range(blocks)
                for ref in (
                    *(words_ref[place, at + number, word, lane] for word in range(kind.words)),
                    *(half_ref[place, at + number, lane] for half_ref in given),
                )
            )
            for place in places
        )

    def add_step(index: Array, sums: tuple[Array, ...], scales: tuple[tuple[Array, ...], ...]) -> tuple[Array, ...]:
        found = list(sums)
        low_count, high_count = step // format.tile_inputs(0), step // format.tile_inputs(1) if has_high else 0
        low, high = (
            [
                [ref[place[:, None], index * count + number, lane[:, None], byte[None, :]] for number in range(count)]
                for place in places
            ]
            if count
            else []
            for ref, count in ((low_ref, low_count), (high_ref, high_count))
        )
        low_at = format.places(step)
        high_at = format.high_places(step) if has_high else [(0, 0)] * len(low_at)
        of_block: list[Any] = [None] * tiling.tiles
        of_group: list[Any] = [None] * tiling.tiles
        shift_of_block: list[Any] = [None] * tiling.tiles
        row_sum: Any = None
        for number, (low_place, high_place) in enumerate(zip(low_at, high_at, strict=True)):
            start = number * format.width
            column = index * step + start + byte
            rows = triton_load(
                x_ref.at[row[:, None], column[None, :]],
                mask=jnp.broadcast_to(live[:, None], (row_count, format.width)),
                other=0,
            )
            if kind.shifts:
                more = jnp.sum(rows.astype(jnp.float32), axis=1)
                row_sum = more if start % format.group == 0 else row_sum + more
            group_ends = (start + format.width) % format.group == 0
            block_ends = (start + format.width) % format.block == 0
            in_step = start // format.block
            per_block = kind.words + kind.halves
            for tile in range(tiling.tiles):
                codes = expand(
                    format, low[tile][low_place[0]], high[tile][high_place[0]] if has_high else None, low_place[1],
                    high_place[1], matrix.dtype, plain=plain,
                )  # fmt: skip
                product = lax.dot_general(
                    codes,
                    rows,
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
                    preferred_element_type=jnp.float32,
                )
                of_group[tile] = product if start % format.group == 0 else of_group[tile] + product
                if not group_ends:
                    continue
                own = scales[tile][in_step * per_block : (in_step + 1) * per_block]
                words, halves = own[: kind.words], own[kind.words :]
                group = start % format.block // format.group
                scale, shift = group_scale(format, words, halves, group, matrix.scale)
                if not kind.blocks:
                    found[tile] = multiply_add(of_group[tile], scale[:, None], found[tile], plain=plain)
                    if shift is not None:
                        found[tile] = multiply_add(shift[:, None], row_sum[None, :], found[tile], plain=plain)
                    continue
                first = start % format.block < format.group
                zero = jnp.zeros((outputs, row_count), jnp.float32)
                before = zero if first else of_block[tile]
                of_block[tile] = multiply_add(of_group[tile], scale[:, None], before, plain=plain)
                if shift is not None:
                    before = zero if first else shift_of_block[tile]
                    shift_of_block[tile] = multiply_add(shift[:, None], row_sum[None, :], before, plain=plain)
                if block_ends:
                    scale, shift = block_scale(format, words, halves)
                    found[tile] = multiply_add(of_block[tile], scale[:, None], found[tile], plain=plain)
                    if shift is not None:
                        found[tile] = multiply_add(shift_of_block[tile], shift[:, None], found[tile], plain=plain)
        return tuple(found)

    first, end = part * steps, jnp.minimum((part + 1) * steps, most)
    nothing = tuple(jnp.zeros((outputs, row_count), jnp.float32) for _ in places)
    if tiling.ahead:

        def body(index: Array, carry: Any) -> Any:
            sums, scales = carry
            following = load_scales(jnp.minimum(index + 1, most - 1))
            return add_step(index, sums, scales), following

        sums, _ = lax.fori_loop(first, end, body, (nothing, load_scales(jnp.minimum(first, most - 1))))
    else:
        sums = lax.fori_loop(first, end, lambda index, sums: add_step(index, sums, load_scales(index)), nothing)
    for tile in range(tiling.tiles):
        output = (block * tiling.tiles + tile) * outputs + of_tile
        triton_store(
            out_ref.at[part, row[None, :], output[:, None]],
            sums[tile],
            mask=live[None, :] & (output < out_ref.shape[2])[:, None],
        )
