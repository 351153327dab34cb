"""Products of integers on NVIDIA GPUs: weights of int8 with a scale a row, inputs rounded to int8 by runs (W8A8).

Inputs are rounded once, by a kernel in front. One program per (block of outputs, tile of rows or part of the inputs):
it multiplies a run at a time by the tensor cores' instructions for integers, whose sums are exact, and adds them up in
float32 by the scales of the run; a weight's own scale comes last. Codes are never expanded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int8

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.expand import round_to_even
from jaxllm.pallas_kernels.gpu.rows import RowLists, given_lists, outputs_of_program, rows_of_program, store_sums
from jaxllm.pallas_kernels.matrices import RUN, KernelMatrix
from jaxllm.pallas_kernels.products import Unsummed

FEWEST_ROWS, MOST_ROWS = 16, 128
"""In a tile."""
PART_STEPS = 4


class IntegerTiling(NamedTuple):
    """How products are cut into programs.

    Attributes:
        block_out: outputs of a program.
        warps, stages: of a program, and steps that are on their way.
        programs: the inputs of a single tile of rows are parted until there would be more, as far as parts have
            `PART_STEPS` steps.
        runs: that a step has, if rows are whole ones of it.
    """

    block_out: int
    warps: int
    stages: int
    programs: int
    runs: int


FEW, MANY = IntegerTiling(64, 4, 4, 512, 2), IntegerTiling(128, 8, 3, 0, 1)
"""Of tiles of up to 32 rows, and of more."""
ROUNDED_RUNS = 16
"""That a program rounds."""


def matmul(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    tile_rows: int = 0,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"] | Unsummed:
    """`x @ matrix.T` with `x` rounded, summed in float32; where rows are walked in parts, what these give.

    With `lists` of tiles of `tile_rows`: what `matmul.grouped_matmul` gives.
    """
    outputs, inputs = matrix.shape[-2:]
    rows = x.shape[0] if lists is None else rows
    size = tile_rows or min(MOST_ROWS, max(FEWEST_ROWS, pl.next_power_of_2(rows)))
    tiling = FEW if size <= 32 else MANY
    blocks = pl.cdiv(outputs, tiling.block_out)
    runs = tiling.runs if inputs % (tiling.runs * RUN) == 0 else 1  # with a mask, where rows are no whole steps
    tiles, parts = pl.cdiv(rows, size) if lists is None else len(lists.tiles), 1
    if lists is None and tiles == 1:
        parts = max(1, min(tiling.programs // blocks, pl.cdiv(inputs, RUN * runs) // PART_STEPS))
    codes, scale = round_runs(x, interpret=interpret)
    kernel = functools.partial(
        _kernel, outputs=outputs, size=size, block_out=tiling.block_out, runs=runs, share=rows // x.shape[0],
        activation=activation,
    )  # fmt: skip
    wide = outputs if activation is None else outputs // 2
    sums = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), jnp.float32 if parts > 1 else dtype),
        grid=(blocks, max(tiles, parts)),
        interpret=interpret,
        compiler_params=triton_compiler_params(tiling.warps if size != 64 else 4, tiling.stages),
        name="matmul_of_integers",
    )(*given_lists(lists), codes, scale, matrix.codes.reshape(-1, inputs), matrix.scale.reshape(-1))
    return sums[0] if parts == 1 else Unsummed(sums)


def round_runs(x: Float[Array, "T i"], *, interpret: bool = False) -> tuple[Int8[Array, "T i"], Float[Array, "T r"]]:
    """See `quantize_runs`: in one kernel, which the compiler would have as three."""
    rows, inputs = x.shape
    runs = pl.cdiv(inputs, RUN)
    return pl.pallas_call(
        _round_kernel,
        out_shape=(jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((rows, runs), jnp.float32)),
        grid=(rows, pl.cdiv(runs, ROUNDED_RUNS)),
        interpret=interpret,
        compiler_params=triton_compiler_params(4, 1),
        name="round_runs",
    )(x)


def _round_kernel(x_ref: Any, codes_ref: Any, scale_ref: Any) -> None:
    row = pl.program_id(0)
    run = pl.program_id(1) * ROUNDED_RUNS + jnp.arange(ROUNDED_RUNS)
    at = run[:, None] * RUN + jnp.arange(RUN)[None, :]
    there = at < x_ref.shape[1]
    x = triton_load(x_ref.at[row, at], mask=there, other=0).astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=1)
    scale = jnp.where(peak > 0, peak / 127, 1)
    codes = round_to_even(x / scale[:, None]).astype(jnp.int32).astype(jnp.int8)
    triton_store(codes_ref.at[row, at], codes, mask=there)
    triton_store(scale_ref.at[row, run], scale, mask=run < scale_ref.shape[1])


def _kernel(
    *refs: Any, outputs: int, size: int, block_out: int, runs: int, share: int,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> None:  # fmt: skip
    *list_refs, x_ref, x_scale_ref, codes_ref, scale_ref, out_ref = refs
    block, second = pl.program_id(0), pl.program_id(1)
    inputs, steps = codes_ref.shape[1], x_scale_ref.shape[1] // runs
    rows = rows_of_program(list_refs, out_ref, out_ref.shape[1], size, steps, second=second)
    mine = outputs_of_program(block, block_out, outputs, gated=activation is not None)
    matrix_row = rows.group * outputs + mine.output
    x_row = lax.div(rows.row, share)

    def add_run(run: Array, sums: Array) -> Array:
        at = run * RUN + jnp.arange(RUN)
        if inputs % RUN == 0:
            codes = codes_ref[matrix_row[:, None], at[None, :]]
            live = jnp.broadcast_to(rows.live[:, None], (size, RUN))
        else:
            there = jnp.broadcast_to((at < inputs)[None, :], (block_out, RUN))
            codes = triton_load(codes_ref.at[matrix_row[:, None], at[None, :]], mask=there, other=0)
            live = rows.live[:, None] & (at < inputs)[None, :]
        given = triton_load(x_ref.at[x_row[:, None], at[None, :]], mask=live, other=0)
        scale = triton_load(x_scale_ref.at[x_row, jnp.broadcast_to(run, (size,))], mask=rows.live, other=0)
        product = lax.dot_general(codes, given, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return sums + product.astype(jnp.float32) * scale[None, :]

    def add_step(index: Array, sums: Array) -> Array:
        for run in range(runs):
            sums = add_run(index * runs + run, sums)
        return sums

    @pl.when(rows.there > 0)
    def _() -> None:
        sums = lax.fori_loop(*rows.steps, add_step, jnp.zeros((block_out, size), jnp.float32))
        store_sums(out_ref, sums * scale_ref[matrix_row][:, None], block, mine, rows, activation)
