"""Products with weights of a few bits in tiles, on NVIDIA GPUs: those of few rows write no number of them to memory.

One program per (some tiles of outputs, tile of rows, part of the inputs). A program walks its inputs a step at a time
while the next ones are loaded, and expands codes in registers to small integers, which 16-bit floats hold exactly.

With a few rows the memory is the limit: a group's products are summed by tensor cores and multiplied by its scale
afterwards, in float32, which is one operation for each row and not for each weight, and rounds nothing. With many rows
the tensor cores are the limit: weights are scaled first. The parts of long rows are walked side by side, and the kernel
that reads their sums adds them up. Matrices of several formats that have the same inputs share a kernel, some blocks
each: a Q4_K_M file has queries and keys in Q4_K, and values in Q6_K. For hundreds of rows weights are expanded in
memory first, large ones in parts: a library multiplies floats at four times the rate of such a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.matmul import Nonlinearity, ProductOptions
from jaxllm.pallas_kernels.gpu.route import RowLists
from jaxllm.pallas_kernels.gpu.walk import Tiling, Walk, arrays_by_name, step_of
from jaxllm.pallas_kernels.matrices import EXPANDED_BYTES, ROWS, SCALES, PackedMatrix
from jaxllm.pallas_kernels.products import Unsummed, dot

FEW_ROWS = 16
"""As many as one instruction of the tensor cores multiplies by."""
MOST_ROWS = 128
SOME_ROWS = 64
"""As many as registers hold sums of, for gates and what they are for, and in steps of 256; tiles of more are split."""

LOADED = 128 * 64
"""Numbers of rows that a step may have if several of them are to fit into the shared memory of any GPU."""

MOST_PARTS = 8
"""That a row's inputs are walked in: the kernel that adds up what they give reads all of it in one program."""

FEW = Tiling(step=128)
MANY = Tiling(warps=4, step=64, stages=3, programs=1, ahead=False, scaled=True)


def late_matmul(
    x: Float[Array, "T i"],
    matrices: Sequence[PackedMatrix],
    *,
    dtype: Any = jnp.float32,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "T o"] | Unsummed:
    """`x` times each of some matrices, side by side; where rows are walked in parts, what these give."""
    count = x.shape[0]
    if count >= min(matrix.format.expanded_from for matrix in matrices) and tiling is None:
        found = [expanded_matmul(x, matrix, dtype=dtype, interpret=interpret) for matrix in matrices]
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)
    tile_rows = min(MOST_ROWS, max(8, pl.next_power_of_2(count)))
    sums = _multiply(x, matrices, None, count, tile_rows, tiling, dtype=dtype, interpret=interpret)
    return sums[0] if len(sums) == 1 else Unsummed(sums)


def grouped_matmul(
    x: Float[Array, "n i"],
    matrix: PackedMatrix,
    lists: RowLists,
    rows: int,
    tile_rows: int,
    **options: Unpack[ProductOptions],
) -> Float[Array, "N o"]:
    """As `matmul.matmul`, of a stack of matrices; lists are of tiles of `tile_rows`."""
    return _multiply(x, [matrix], lists, rows, tile_rows, **options)[0]


@dataclass(frozen=True)
class Section:
    """A matrix among those of a kernel, to which some blocks of programs belong."""

    matrix: PackedMatrix
    names: tuple[str, ...]
    """Of those, in the order in which the kernel is given them."""
    tiling: Tiling
    step: int
    outputs: int
    blocks: int


def _multiply(
    x: jax.Array, matrices: Sequence[PackedMatrix], lists: RowLists | None, rows: int, tile_rows: int,
    tiling: Tiling | None = None, *, activation: Nonlinearity | None = None, dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "P T o"]:  # fmt: skip
    """What each part of the inputs gives: float32, or of `dtype` where there is only one."""
    x = x.astype(matrices[0].dtype)
    inputs = x.shape[1]
    tilings = [tiling or _best(matrix, tile_rows, activation is not None) for matrix in matrices]
    warps = min(each.warps for each in tilings)
    tilings = [replace(each, warps=warps) for each in tilings]
    steps = [step_of(inputs, matrix, each.step) for matrix, each in zip(matrices, tilings, strict=True)]
    longer = any(step > each.step for step, each in zip(steps, tilings, strict=True))
    split = 2 if tile_rows > SOME_ROWS and (activation is not None or longer) else 1
    tile_rows //= split
    stages = 1 if tile_rows * max(steps) > LOADED else min(each.stages for each in tilings)
    given: list[jax.Array] = [] if lists is None else [lists.tiles, lists.rows]
    sections = []
    for matrix, each, step in zip(matrices, tilings, steps, strict=True):
        arrays = arrays_by_name(matrix)
        outputs = matrix.shape[-2]
        wide = outputs if activation is None else outputs // 2
        blocks = pl.cdiv(wide, ROWS * warps * (each.tiles if activation is None else 1))
        bare = jax.tree.map(lambda _: None, matrix)
        sections.append(Section(bare, tuple(arrays), each, step, outputs, blocks))
        given += arrays.values()
    total = sum(section.blocks for section in sections)
    wide = sum(section.outputs for section in sections) // (1 if activation is None else 2)
    row_tiles = pl.cdiv(rows, tile_rows) if lists is None else len(lists.tiles) * split
    parts = 1
    if lists is None:
        most = min(MOST_PARTS, inputs // max(each.least for each in tilings), inputs // max(steps))
        parts = max(1, min(min(each.programs for each in tilings) // (total * row_tiles), most))
    return pl.pallas_call(
        functools.partial(
            _kernel, sections=tuple(sections), listed=lists is not None, tile_rows=tile_rows, split=split,
            share=rows // x.shape[0], activation=activation, plain=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), dtype if parts == 1 else jnp.float32),
        grid=(total, row_tiles, parts),
        interpret=interpret,
        compiler_params=triton_compiler_params(warps, stages),
        name="packed_matmul",
    )(x, *given)  # fmt: skip


def _best(matrix: PackedMatrix, tile_rows: int, gated: bool) -> Tiling:
    tiling = _few(matrix, tile_rows, gated) if tile_rows <= FEW_ROWS else _many(matrix)
    return replace(tiling, tiles=2) if gated else tiling


def _few(matrix: PackedMatrix, tile_rows: int, gated: bool) -> Tiling:
    """The best of those measured on an H200 that spill no registers on any GPU: scales loaded ahead must fit in."""
    format = matrix.format
    if format.width < 32:  # with four warps a thread has less than the four bytes that can be loaded ahead
        shorter = gated and format.scales == "zero" and format.group >= 32
        return replace(FEW, warps=2, step=128 if shorter else 256, ahead=not (gated or format.has_shift))
    if gated and format.high:
        return replace(FEW, warps=2, stages=2, ahead=False)
    if gated:
        longer = format.bits < 8 and not (format.has_shift or format.e2m1)
        return replace(FEW, warps=2, step=256, ahead=False) if longer else replace(FEW, ahead=False)
    if format.bits == 8:
        return replace(FEW, warps=2, ahead=not format.has_shift)
    if tile_rows > 8 and format.has_shift:
        warps = 4 if format.high and not SCALES[format.scales].blocks else 2
        return replace(FEW, warps=warps, step=256 if format.group >= 128 else 128, ahead=False)
    if tile_rows > 8 and not format.high:
        return replace(FEW, warps=2, step=256)
    if format.e2m1 or format.scales == "zero":
        return replace(FEW, step=256, ahead=False)
    return replace(FEW, warps=2) if format.scales == "k_pairs" and not format.high else FEW


def _many(matrix: PackedMatrix) -> Tiling:
    """Scales of two levels, or for many inputs, spill unless loaded ahead; two bits with minima, without more
    threads.
    """
    format = matrix.format
    ahead = format.scales == "k_pairs" or format.group >= 128
    return replace(MANY, warps=8 if format.width < 32 and format.has_shift else 4, ahead=ahead)


def _kernel(
    x_ref: Any, *refs: Any, sections: tuple[Section, ...], listed: bool, tile_rows: int, split: int, share: int,
    activation: Nonlinearity | None, plain: bool,
) -> None:  # fmt: skip
    *arrays, out_ref = refs
    list_refs, left = (arrays[:2], iter(arrays[2:])) if listed else ([], iter(arrays))
    program, row_tile, part = (pl.program_id(axis) for axis in range(3))
    parts, rows, _ = out_ref.shape
    if listed:
        group, first, count = (list_refs[0][lax.div(row_tile, split), column] for column in range(3))
        before = lax.rem(row_tile, split) * tile_rows
        first, count = first + before, count - before
    else:
        group, first, count = 0, row_tile * tile_rows, rows - row_tile * tile_rows

    def run(section: Section, given: dict[str, Any], block: Array, first_output: int) -> None:
        tiling = section.tiling
        at = first + jnp.arange(tile_rows)
        live = jnp.arange(tile_rows) < count
        row = triton_load(list_refs[1].at[at], mask=live, other=rows) if listed else at
        of_tile = jnp.arange(ROWS * tiling.warps)
        own = section.outputs // ROWS  # tiles of this group's matrix
        half = own // 2

        def place(index: int) -> Array:
            """The tile of each output that this program's tile `index` is for; after the last, the last."""
            number = block if activation is not None else block * tiling.tiles + index
            number = number * tiling.warps + lax.div(of_tile, ROWS)
            if activation is None:
                return group * own + jnp.minimum(number, own - 1)
            return group * own + index * half + jnp.minimum(number, half - 1)

        places = [place(index) for index in range(tiling.tiles)]
        walk = Walk(given, section.matrix, tiling, section.step, places, plain)
        steps = pl.cdiv(pl.cdiv(x_ref.shape[1], section.step), parts)
        found = walk(x_ref, lax.div(row, share), live, part * steps, steps)
        wide = section.outputs
        if activation is not None:
            gate, up = found
            found, wide = (activation(gate) * up,), wide // 2
        for index, sums in enumerate(found):
            output = (block * len(found) + index) * len(of_tile) + of_tile
            triton_store(
                out_ref.at[part, row[None, :], first_output + output[:, None]],
                sums.astype(out_ref.dtype),
                mask=live[None, :] & (output < wide)[:, None],
            )

    block, output = program, 0
    for section in sections:
        mine = functools.partial(run, section, {name: next(left) for name in section.names}, block, output)
        if len(sections) > 1:
            pl.when((block >= 0) & (block < section.blocks))(mine)
        elif listed:
            pl.when(count > 0)(mine)
        else:
            mine()
        block, output = block - section.blocks, output + section.outputs


EXPANDING = Tiling(warps=4, step=256, stages=1)


def expanded_matmul(
    x: Float[Array, "T i"], matrix: PackedMatrix, *, dtype: Any = jnp.float32, interpret: bool = False
) -> Float[Array, "T o"]:
    """`x @ matrix.T`, summed in float32."""
    outputs, inputs = matrix.shape
    tiles = outputs // ROWS
    some = min(tiles, max(1, EXPANDED_BYTES // (ROWS * inputs * matrix.dtype.itemsize)))
    x = x.astype(matrix.dtype)
    found = []
    for first in range(0, tiles, some):
        weights = expand_tiles(matrix, first, min(some, tiles - first), interpret=interpret)
        found.append(dot(x, weights, dtype=dtype if dtype == x.dtype else jnp.float32).astype(dtype))
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


def expand_tiles(matrix: PackedMatrix, first: int, count: int, *, interpret: bool = False) -> Float[Array, "o i"]:
    """The rows of `count` tiles in the model's type."""
    inputs = matrix.shape[-1]
    step = step_of(inputs, matrix, EXPANDING.step)
    given = arrays_by_name(matrix)
    return pl.pallas_call(
        functools.partial(
            _expand_kernel, names=tuple(given), matrix=jax.tree.map(lambda _: None, matrix), first=first, step=step,
            plain=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((count * ROWS, inputs), matrix.dtype),
        grid=(pl.cdiv(count, EXPANDING.warps), pl.cdiv(inputs, step)),
        interpret=interpret,
        compiler_params=triton_compiler_params(EXPANDING.warps, EXPANDING.stages),
        name="expand_tiles",
    )(*given.values())  # fmt: skip


def _expand_kernel(
    *refs: Any, names: tuple[str, ...], matrix: PackedMatrix, first: int, step: int, plain: bool
) -> None:
    *arrays, out_ref = refs
    rows, inputs = out_ref.shape
    block, index = pl.program_id(0), pl.program_id(1)
    row = block * (ROWS * EXPANDING.warps) + jnp.arange(ROWS * EXPANDING.warps)
    inside = row < rows
    place = first + lax.div(jnp.minimum(row, rows - 1), ROWS)
    walk = Walk(dict(zip(names, arrays, strict=True)), matrix, EXPANDING, step, [place], plain)
    (scales,) = walk.scales(index)
    (low,), (high,) = walk.codes("low", index), walk.codes("high", index)
    width = matrix.format.width
    for number in range(step // width):
        begin = index * step + number * width
        column = begin + jnp.arange(width)
        there = inside if number * width < (inputs % step or step) else inside & (begin < inputs)
        triton_store(
            out_ref.at[row[:, None], column[None, :]],
            walk.scaled(low, high, scales, number),
            mask=jnp.broadcast_to(there[:, None], (len(row), width)),
        )
