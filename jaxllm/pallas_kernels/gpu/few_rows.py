"""Products of few rows with weights of codes, on NVIDIA GPUs: each byte is read once, many of them at a time.

A program walks its inputs some groups of codes at a time while the next ones are loaded, and makes numbers of codes in
registers for the tensor cores. Codes of e4m3 in blocks that share a scale are made 16-bit floats, and their sums are
multiplied by the scale, in float32: that is one operation for each row where scaling weights would be one for each
weight, and rounds nothing. Their outputs come first in the tensor cores' products, for which 8 rows are then enough.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_load
from jaxllm.pallas_kernels.gpu.expand import numbers_of_e4m3
from jaxllm.pallas_kernels.gpu.matmul import PART_STEPS, ProductOptions, TileProduct, integer_matmul, launch, matmul
from jaxllm.pallas_kernels.gpu.route import RowLists
from jaxllm.pallas_kernels.matrices import KernelMatrix
from jaxllm.pallas_kernels.products import Late, Unsummed, dot

MOST_ROWS = 16
"""As many as the tensor cores multiply by at least; `matmul` is for more."""


def code_product(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    tile_rows: int = 0,
    **options: Unpack[ProductOptions],
) -> Late:
    """`matmul` by the kernel that suits the matrix and the rows; `lists` are of tiles of `tile_rows`."""
    if matrix.rounds:
        return integer_matmul(x, matrix, lists, rows, tile_rows, **options)
    if (tile_rows or x.shape[0]) <= MOST_ROWS:
        if knows_blocks(matrix):
            return few_rows_of_blocks(x, matrix, lists, rows, **options)
        if knows_groups(matrix):
            return few_rows_of_groups(x, matrix, lists, rows, **options)
    return matmul(x, matrix, lists, rows, **options)


BLOCK_OUT = 32
BLOCK_BYTES = {2: 256, 4: 64}
"""Of each row's codes, expanded at a time to that many bytes of numbers."""
GROUP_STEPS = 8
"""Blocks of a row that a program walks, if it is to have neighbours that walk the rest."""
PROGRAMS = 512
"""Rows of groups are not parted where there are more blocks of outputs; those of blocks are parted until there would be
more programs, as far as parts have `PART_STEPS` steps."""
NUM_WARPS, NUM_STAGES = 4, 3
"""The best on an H100, as are the sizes above: benchmarks/results/gpu.md."""


def knows_groups(matrix: KernelMatrix) -> bool:
    """Codes of eight bits or fewer in rows of groups, whose scales are their own and whose bytes are a power of two."""
    grouped = matrix.codes.dtype == jnp.uint8 and matrix.scale is not None and matrix.scale_rows == 1
    return grouped and matrix.group_stored == pl.next_power_of_2(matrix.group_stored)


def few_rows_of_groups(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    **options: Unpack[ProductOptions],
) -> Float[Array, "N o"] | Unsummed:
    """As `matmul`, of at most MOST_ROWS rows or tiles of as many; rows may be walked in parts."""
    outputs, stored = matrix.codes.shape[-2:]
    nbytes = min(BLOCK_BYTES[jnp.dtype(matrix.dtype).itemsize], pl.next_power_of_2(stored))
    rows = x.shape[0] if lists is None else rows
    whole = lists is not None or pl.cdiv(outputs, BLOCK_OUT) > PROGRAMS
    tables = {
        name: table if name == "levels" else table.reshape(-1, table.shape[-1]) for name, table in matrix.tables.items()
    }
    return launch(
        "few_rows", functools.partial(_group_kernel, matrix=matrix, names=tuple(tables), nbytes=nbytes),
        x.astype(matrix.dtype), [matrix.codes.reshape(-1, stored), *tables.values()], lists, rows,
        TileProduct(outputs, BLOCK_OUT, MOST_ROWS, rows // x.shape[0], **options),
        parts=1 if whole else pl.cdiv(pl.cdiv(stored, nbytes), GROUP_STEPS), warps=NUM_WARPS, stages=NUM_STAGES,
    )  # fmt: skip


def _group_kernel(
    list_refs: Sequence[Any], refs: Sequence[Any], out_ref: Any, product: TileProduct, *, matrix: KernelMatrix,
    names: tuple[str, ...], nbytes: int,
) -> None:  # fmt: skip
    x_ref, codes_ref, *table_refs = refs
    tables = dict(zip(names, table_refs, strict=True))
    stored = codes_ref.shape[1]
    program = product.program(list_refs, out_ref, pl.cdiv(stored, nbytes))
    matrix_row, inside = program.matrix_row, program.inside
    group = matrix.group_stored
    groups = max(1, nbytes // group)

    def of_groups(name: str, first: Array) -> Array:
        """A table's numbers for the block that begins at byte `first`, one for each byte of it."""
        at = lax.div(first, group) + jnp.arange(groups)
        mask = inside[:, None] & (at < stored // group)[None, :]
        found = triton_load(tables[name].at[matrix_row[:, None], at[None, :]], mask=mask, other=0).astype(jnp.float32)
        return jnp.broadcast_to(found[:, :, None], (BLOCK_OUT, groups, nbytes // groups)).reshape(BLOCK_OUT, nbytes)

    def add_block(index: Array, sums: Array) -> Array:
        first = index * nbytes
        at = first + jnp.arange(nbytes)
        there = at < stored
        mask = inside[:, None] & there[None, :]
        codes = triton_load(codes_ref.at[matrix_row[:, None], at[None, :]], mask=mask, other=0)
        scale = of_groups("scale", first)
        zero = float(matrix.middle) if matrix.zero is None else of_groups("zero", first)
        for plane in range(matrix.planes):
            code = matrix.codes_in(codes, plane)
            if matrix.levels:
                values = triton_load(tables["levels"].at[code], mask=mask, other=0) * scale
            else:
                values = (code.astype(jnp.float32) - zero) * scale
            column = matrix.columns(at, plane)
            inputs = triton_load(
                x_ref.at[program.x_row[:, None], column[None, :]], mask=program.live[:, None] & there[None, :], other=0
            )
            sums += dot(inputs, values.astype(matrix.dtype))
        return sums

    product.add_up(program, out_ref, add_block, axis=1)


BLOCKS_OUT = 64
"""Outputs of a program whose weights have scales for blocks."""
FEWEST_INPUTS, MOST_INPUTS = 32, 128
"""That are multiplied at a time."""


def knows_blocks(matrix: KernelMatrix) -> bool:
    """Codes of e4m3 for a model of 16-bit floats, with a scale for some neighbouring inputs, a power of two."""
    columns = matrix.scale_columns
    blocks = matrix.codes.dtype == jnp.float8_e4m3fn and matrix.scale is not None and not matrix.scales_whole_rows
    narrow = blocks and np.dtype(matrix.dtype).itemsize == 2
    return narrow and columns >= FEWEST_INPUTS and columns == pl.next_power_of_2(columns)


def few_rows_of_blocks(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    **options: Unpack[ProductOptions],
) -> Float[Array, "N o"] | Unsummed:
    """As `few_rows_of_groups`."""
    outputs, inputs = matrix.shape[-2:]
    step = min(MOST_INPUTS, matrix.scale_columns)
    rows = x.shape[0] if lists is None else rows
    most = min(PROGRAMS // pl.cdiv(outputs, BLOCKS_OUT), inputs // step // PART_STEPS)
    codes = lax.bitcast_convert_type(matrix.codes, jnp.uint8).reshape(-1, inputs)
    tile_rows = MOST_ROWS if lists is not None or rows > 8 else 8
    return launch(
        "block_scaled_few_rows", functools.partial(_block_kernel, matrix=matrix, step=step),
        x.astype(matrix.dtype), [codes, matrix.scale.reshape(-1, matrix.scale.shape[-1])], lists, rows,
        TileProduct(outputs, BLOCKS_OUT, tile_rows, rows // x.shape[0], **options),
        parts=1 if lists is not None else max(1, most), warps=2, stages=3,
    )  # fmt: skip


def _block_kernel(
    list_refs: Sequence[Any], refs: Sequence[Any], out_ref: Any, product: TileProduct, *, matrix: KernelMatrix,
    step: int,
) -> None:  # fmt: skip
    x_ref, codes_ref, scale_ref = refs
    program = product.program(list_refs, out_ref, codes_ref.shape[1] // step)
    scales_of_group = product.outputs // matrix.scale_rows
    scale_row = program.group * scales_of_group + lax.div(program.output, matrix.scale_rows)

    def add_step(index: Array, sums: Array) -> Array:
        at = index * step + jnp.arange(step)
        codes = codes_ref[program.matrix_row[:, None], at[None, :]]
        mask = jnp.broadcast_to(program.live[:, None], (product.tile_rows, step))
        inputs = triton_load(x_ref.at[program.x_row[:, None], at[None, :]], mask=mask, other=0)
        column = jnp.broadcast_to(lax.div(index * step, matrix.scale_columns), scale_row.shape)
        sums_of_step = dot(numbers_of_e4m3(codes, inputs.dtype, plain=product.interpret), inputs)
        return sums + sums_of_step * scale_ref[scale_row, column][:, None]

    product.add_up(program, out_ref, add_step)
