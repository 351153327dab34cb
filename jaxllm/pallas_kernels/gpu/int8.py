"""Products of integers on NVIDIA GPUs: weights of int8 with a scale a row, inputs rounded to int8 by runs (W8A8).

Inputs are rounded once, by a kernel in front. One program per (block of outputs, tile of rows or part of the inputs):
it multiplies a run at a time by the tensor cores' instructions for integers, whose sums are exact, and adds them up in
float32 by the scales of the run; a weight's own scale comes last. Codes are never expanded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int8

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.float8 import round_to_even
from jaxllm.pallas_kernels.gpu.groups import RowLists
from jaxllm.pallas_kernels.gpu.row_tiles import outputs_of_program, rows_of_program, store_sums
from jaxllm.pallas_kernels.kernel_matrix import KernelMatrix
from jaxllm.pallas_kernels.rounded import RUN

FEWEST_ROWS, MOST_ROWS = 16, 128
"""In a tile."""
PROGRAMS = 512
"""The inputs of a single tile of rows are parted until there are that many, as far as parts have `PART_RUNS` runs."""
PART_RUNS = 8
ROUNDED_RUNS = 16
"""That a program rounds."""


def matmul(
    x: Float[Array, "T i"], matrix: KernelMatrix, dtype: Any = jnp.float32, *, interpret: bool = False
) -> Float[Array, "T o"]:
    """`x @ matrix.T` with `x` rounded, summed in float32."""
    outputs, inputs = matrix.shape
    size = min(MOST_ROWS, max(FEWEST_ROWS, pl.next_power_of_2(x.shape[0])))
    tiles, blocks = pl.cdiv(x.shape[0], size), pl.cdiv(outputs, _block_out(size))
    parts = 1 if tiles > 1 else max(1, min(pl.cdiv(PROGRAMS, blocks), inputs // RUN // PART_RUNS))
    out = jax.ShapeDtypeStruct((parts, x.shape[0], outputs), jnp.float32 if parts > 1 else dtype)
    sums = _call(x, matrix, (), size, (blocks, max(tiles, parts)), out, None, interpret)
    return sums[0] if parts == 1 else jnp.sum(sums, axis=0).astype(dtype)


def grouped_matmul(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists,
    rows: int,
    tile_rows: int,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"]:
    """See `matmul.grouped_matmul`; `tile_rows` are those of the lists."""
    outputs = matrix.shape[-2]
    grid = (pl.cdiv(outputs, _block_out(tile_rows)), len(lists.tiles))
    out = jax.ShapeDtypeStruct((1, rows, outputs if activation is None else outputs // 2), dtype)
    return _call(x, matrix, (lists.tiles, lists.rows), tile_rows, grid, out, activation, interpret)[0]


def round_runs(x: Float[Array, "T i"], *, interpret: bool = False) -> tuple[Int8[Array, "T i"], Float[Array, "T r"]]:
    """See `rounded.quantize_runs`: in one kernel, which the compiler would have as three."""
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


def _block_out(tile_rows: int) -> int:
    return 64 if tile_rows <= 32 else 128


def _call(
    x: jax.Array, matrix: KernelMatrix, lists: tuple[jax.Array, ...], size: int, grid: tuple[int, int],
    out: jax.ShapeDtypeStruct, activation: Callable[[jax.Array], jax.Array] | None, interpret: bool,
) -> jax.Array:  # fmt: skip
    outputs, inputs = matrix.shape[-2:]
    codes, scale = round_runs(x, interpret=interpret)
    kernel = functools.partial(
        _kernel, outputs=outputs, size=size, share=out.shape[1] // x.shape[0], activation=activation
    )
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        interpret=interpret,
        compiler_params=triton_compiler_params(8 if size > 64 else 4, 3 if size > 32 else 4),
        name="matmul_of_integers",
    )(*lists, codes, scale, matrix.codes.reshape(-1, inputs), matrix.scale.reshape(-1))


def _kernel(
    *refs: Any, outputs: int, size: int, share: int, activation: Callable[[jax.Array], jax.Array] | None
) -> None:
    *list_refs, x_ref, x_scale_ref, codes_ref, scale_ref, out_ref = refs
    block, second = pl.program_id(0), pl.program_id(1)
    inputs, runs = codes_ref.shape[1], x_scale_ref.shape[1]
    rows = rows_of_program(list_refs, out_ref, out_ref.shape[1], size, runs, second=second)
    mine = outputs_of_program(block, _block_out(size), outputs, gated=activation is not None)
    matrix_row = rows.group * outputs + mine.output
    x_row = lax.div(rows.row, share)

    def add_run(index: Array, sums: Array) -> Array:
        at = index * RUN + jnp.arange(RUN)
        there = at < inputs
        of_rows = rows.live[:, None] & there[None, :]
        of_codes = jnp.broadcast_to(there[None, :], (len(mine.lane), RUN))
        if inputs % RUN == 0:
            of_rows = jnp.broadcast_to(rows.live[:, None], (size, RUN))
            codes = codes_ref[matrix_row[:, None], at[None, :]]
        else:
            codes = triton_load(codes_ref.at[matrix_row[:, None], at[None, :]], mask=of_codes, other=0)
        given = triton_load(x_ref.at[x_row[:, None], at[None, :]], mask=of_rows, other=0)
        scale = triton_load(x_scale_ref.at[x_row, jnp.broadcast_to(index, (size,))], mask=rows.live, other=0)
        product = lax.dot_general(codes, given, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return sums + product.astype(jnp.float32) * scale[None, :]

    @pl.when(rows.count > 0)
    def _() -> None:
        sums = lax.fori_loop(*rows.steps, add_run, jnp.zeros((len(mine.lane), size), jnp.float32))
        store_sums(out_ref, sums * scale_ref[matrix_row][:, None], block, mine, rows, activation)
