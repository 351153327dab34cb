"""Products of few rows with weights of e4m3 in blocks that share a scale, on NVIDIA GPUs: each byte is read once.

One program per (block of outputs, part of the inputs, or tile of a group's rows). A program walks its inputs as many at
a time as share a scale while the next ones are loaded, makes 16-bit floats of codes in registers, and multiplies the
sums by the scale, in float32: that is one operation for each row where scaling weights would be one for each weight,
and rounds nothing. Outputs come first in the tensor cores' products, of which then 8 rows are enough. The parts of long
rows are walked side by side, and what they give is added up by the kernel that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load
from jaxllm.pallas_kernels.gpu.float8 import numbers_of_e4m3
from jaxllm.pallas_kernels.gpu.groups import RowLists
from jaxllm.pallas_kernels.gpu.row_tiles import outputs_of_program, rows_of_program, store_sums
from jaxllm.pallas_kernels.late import Unsummed
from jaxllm.pallas_kernels.matrices import KernelMatrix

MOST_ROWS = 16
"""As many as are multiplied at a time; `matmul` is for more."""
BLOCK_OUT = 64
FEWEST_INPUTS, MOST_INPUTS = 32, 128
"""That are multiplied at a time."""
PROGRAMS = 512
"""Rows are parted until there would be more, as far as parts have `PART_STEPS` steps."""
PART_STEPS = 4
NUM_WARPS, NUM_STAGES = 2, 3


def knows(matrix: KernelMatrix) -> bool:
    """Codes of e4m3 for a model of 16-bit floats, with a scale for some neighbouring inputs, a power of two."""
    columns = matrix.scale_columns
    blocks = matrix.codes.dtype == jnp.float8_e4m3fn and matrix.scale is not None and not matrix.scales_whole_rows
    return (
        blocks
        and np.dtype(matrix.dtype).itemsize == 2
        and columns >= FEWEST_INPUTS
        and columns == pl.next_power_of_2(columns)
    )


def few_rows(
    x: Float[Array, "T i"], matrix: KernelMatrix, dtype: Any = jnp.float32, *, interpret: bool = False
) -> Float[Array, "T o"] | Unsummed:
    """`x @ matrix.T` of at most MOST_ROWS rows, summed in float32; where rows are walked in parts, what these give."""
    outputs, inputs = matrix.shape
    blocks, steps = pl.cdiv(outputs, BLOCK_OUT), inputs // _step(matrix)
    parts = max(1, min(PROGRAMS // blocks, steps // PART_STEPS))
    sums = _call(
        x, matrix, (), x.shape[0], outputs, (blocks, parts), jnp.float32 if parts > 1 else dtype, None, interpret
    )
    return sums[0] if parts == 1 else Unsummed(sums)


def grouped_few_rows(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists,
    rows: int,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"]:
    """See `matmul.grouped_matmul`; tiles have at most MOST_ROWS rows."""
    width = matrix.shape[-2] if activation is None else matrix.shape[-2] // 2
    grid = (pl.cdiv(matrix.shape[-2], BLOCK_OUT), len(lists.tiles))
    return _call(x, matrix, (lists.tiles, lists.rows), rows, width, grid, dtype, activation, interpret)[0]


def _step(matrix: KernelMatrix) -> int:
    return min(MOST_INPUTS, matrix.scale_columns)


def _call(
    x: jax.Array, matrix: KernelMatrix, lists: tuple[jax.Array, ...], rows: int, width: int, grid: tuple[int, int],
    dtype: Any, activation: Callable[[jax.Array], jax.Array] | None, interpret: bool,
) -> jax.Array:  # fmt: skip
    outputs, inputs = matrix.shape[-2:]
    codes = lax.bitcast_convert_type(matrix.codes, jnp.uint8).reshape(-1, inputs)
    kernel = functools.partial(
        _kernel, outputs=outputs, scale_rows=matrix.scale_rows, scale_columns=matrix.scale_columns, step=_step(matrix),
        share=rows // x.shape[0], activation=activation, plain=interpret,
    )  # fmt: skip
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((1 if lists else grid[1], rows, width), dtype),
        grid=grid,
        interpret=interpret,
        compiler_params=triton_compiler_params(NUM_WARPS, NUM_STAGES),
        name="block_scaled_few_rows",
    )(*lists, x.astype(matrix.dtype), codes, matrix.scale.reshape(-1, matrix.scale.shape[-1]))


def _kernel(
    *refs: Any, outputs: int, scale_rows: int, scale_columns: int, step: int, share: int,
    activation: Callable[[jax.Array], jax.Array] | None, plain: bool,
) -> None:  # fmt: skip
    *list_refs, x_ref, codes_ref, scale_ref, out_ref = refs
    block, second = pl.program_id(0), pl.program_id(1)
    num_rows = out_ref.shape[1]
    size = MOST_ROWS if list_refs or num_rows > 8 else 8
    rows = rows_of_program(list_refs, out_ref, num_rows, size, codes_ref.shape[1] // step, second=second)
    mine = outputs_of_program(block, BLOCK_OUT, outputs, gated=activation is not None)
    matrix_row = rows.group * outputs + mine.output
    scale_row = rows.group * (outputs // scale_rows) + lax.div(mine.output, scale_rows)
    x_row = lax.div(rows.row, share)

    def add_step(index: Array, sums: Array) -> Array:
        at = index * step + jnp.arange(step)
        codes = codes_ref[matrix_row[:, None], at[None, :]]
        inputs = triton_load(
            x_ref.at[x_row[:, None], at[None, :]], mask=jnp.broadcast_to(rows.live[:, None], (size, step)), other=0
        )
        scale = scale_ref[scale_row, jnp.broadcast_to(lax.div(index * step, scale_columns), scale_row.shape)]
        product = lax.dot_general(
            numbers_of_e4m3(codes, inputs.dtype, plain=plain),
            inputs,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return sums + product * scale[:, None]

    @pl.when(rows.there > 0)
    def _() -> None:
        sums = lax.fori_loop(*rows.steps, add_step, jnp.zeros((BLOCK_OUT, size), jnp.float32))
        store_sums(out_ref, sums, block, mine, rows, activation)
