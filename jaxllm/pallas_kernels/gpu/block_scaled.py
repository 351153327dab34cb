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
from jaxllm.pallas_kernels.gpu.expand import numbers_of_e4m3
from jaxllm.pallas_kernels.gpu.rows import RowLists, given_lists, outputs_of_program, rows_of_program, store_sums
from jaxllm.pallas_kernels.matrices import KernelMatrix
from jaxllm.pallas_kernels.products import Unsummed, dot

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
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"] | Unsummed:
    """`x @ matrix.T` of at most MOST_ROWS rows, summed in float32; where rows are walked in parts, what these give.

    With `lists` of tiles of at most as many: what `matmul.grouped_matmul` gives.
    """
    outputs, inputs = matrix.shape[-2:]
    blocks, step = pl.cdiv(outputs, BLOCK_OUT), min(MOST_INPUTS, matrix.scale_columns)
    rows = x.shape[0] if lists is None else rows
    parts = 1 if lists is not None else max(1, min(PROGRAMS // blocks, inputs // step // PART_STEPS))
    codes = lax.bitcast_convert_type(matrix.codes, jnp.uint8).reshape(-1, inputs)
    kernel = functools.partial(
        _kernel, outputs=outputs, scale_rows=matrix.scale_rows, scale_columns=matrix.scale_columns, step=step,
        share=rows // x.shape[0], activation=activation, plain=interpret,
    )  # fmt: skip
    wide = outputs if activation is None else outputs // 2
    sums = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), jnp.float32 if parts > 1 else dtype),
        grid=(blocks, parts if lists is None else len(lists.tiles)),
        interpret=interpret,
        compiler_params=triton_compiler_params(NUM_WARPS, NUM_STAGES),
        name="block_scaled_few_rows",
    )(*given_lists(lists), x.astype(matrix.dtype), codes, matrix.scale.reshape(-1, matrix.scale.shape[-1]))
    return sums[0] if parts == 1 else Unsummed(sums)


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
        product = dot(numbers_of_e4m3(codes, inputs.dtype, plain=plain), inputs)
        return sums + product * scale[:, None]

    @pl.when(rows.there > 0)
    def _() -> None:
        sums = lax.fori_loop(*rows.steps, add_step, jnp.zeros((BLOCK_OUT, size), jnp.float32))
        store_sums(out_ref, sums, block, mine, rows, activation)
