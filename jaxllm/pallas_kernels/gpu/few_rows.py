"""Products of few rows with weights of a few bits, on NVIDIA GPUs: each code is read once, many of them at a time.

One program per (block of outputs, part of the inputs). A program walks its inputs some groups at a time, loads the next
ones meanwhile, and expands codes in registers for the tensor cores. The parts of long rows are walked side by side, and
their sums joined by one more kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.kernel_matrix import KernelMatrix

MOST_ROWS = 16
"""As many as the tensor cores multiply by at least; `matmul` is for more."""
BLOCK_OUT = 32
BLOCK_BYTES = {2: 256, 4: 64}
"""Of each row's codes, expanded at a time to numbers of so many bytes."""
PART_STEPS = 8
"""Blocks of a row that a program walks, if it is to have neighbours that walk the rest."""
MANY_PROGRAMS = 512
"""Blocks of outputs that occupy a GPU, so that rows are not parted."""
NUM_WARPS, NUM_STAGES = 4, 3
"""The best on an H100, as are the sizes above: docs/gpu.md."""


def knows(matrix: KernelMatrix) -> bool:
    """Codes of eight bits or fewer in rows of groups, whose scales are their own and whose bytes are a power of two."""
    grouped = matrix.codes.dtype == jnp.uint8 and matrix.scale is not None and matrix.scale_rows == 1
    return grouped and matrix.codes.ndim == 2 and matrix.group_stored == pl.next_power_of_2(matrix.group_stored)


def few_rows(x: Float[Array, "T i"], matrix: KernelMatrix, *, interpret: bool = False) -> Float[Array, "T o"]:
    """`x @ matrix.T` in float32, of at most MOST_ROWS rows."""
    outputs, stored = matrix.codes.shape
    tables = {"scale": matrix.scale, "zero": matrix.zero, "levels": matrix.levels_table}
    given = {name: table for name, table in tables.items() if table is not None}
    nbytes = min(BLOCK_BYTES[jnp.dtype(matrix.dtype).itemsize], pl.next_power_of_2(stored))
    steps, blocks = pl.cdiv(stored, nbytes), pl.cdiv(outputs, BLOCK_OUT)
    parts = 1 if blocks > MANY_PROGRAMS else pl.cdiv(steps, PART_STEPS)
    sums = pl.pallas_call(
        functools.partial(_kernel, matrix=matrix, names=tuple(given), nbytes=nbytes, steps=pl.cdiv(steps, parts)),
        out_shape=jax.ShapeDtypeStruct((parts, x.shape[0], outputs), jnp.float32),
        grid=(blocks, parts),
        interpret=interpret,
        compiler_params=triton_compiler_params(NUM_WARPS, NUM_STAGES),
        name="few_rows",
    )(x.astype(matrix.dtype), matrix.codes, *given.values())
    return sums[0] if parts == 1 else jnp.sum(sums, axis=0)


def _kernel(
    x_ref: Any, codes_ref: Any, *tables_and_output: Any, matrix: KernelMatrix, names: tuple[str, ...], nbytes: int,
    steps: int,
) -> None:  # fmt: skip
    *table_refs, out_ref = tables_and_output
    tables = dict(zip(names, table_refs, strict=True))
    outputs, stored = codes_ref.shape
    part = pl.program_id(1)
    output = pl.program_id(0) * BLOCK_OUT + jnp.arange(BLOCK_OUT)
    row = jnp.arange(MOST_ROWS)
    inside, live = output < outputs, row < x_ref.shape[0]
    group = matrix.group_stored
    groups = max(1, nbytes // group)

    def of_groups(name: str, first: Array) -> Array:
        """A table's numbers for the block that begins at byte `first`, one for each byte of it."""
        at = lax.div(first, group) + jnp.arange(groups)
        mask = inside[:, None] & (at < stored // group)[None, :]
        found = triton_load(tables[name].at[output[:, None], at[None, :]], mask=mask, other=0).astype(jnp.float32)
        return jnp.broadcast_to(found[:, :, None], (BLOCK_OUT, groups, nbytes // groups)).reshape(BLOCK_OUT, nbytes)

    def add_block(index: Array, sums: Array) -> Array:
        first = (part * steps + index) * nbytes
        at = first + jnp.arange(nbytes)
        there = at < stored
        mask = inside[:, None] & there[None, :]
        codes = triton_load(codes_ref.at[output[:, None], at[None, :]], mask=mask, other=0)
        scale = of_groups("scale", first)
        zero = float(matrix.middle) if matrix.zero is None else of_groups("zero", first)
        for plane in range(matrix.planes):
            code = matrix.codes_in(codes, plane)
            if matrix.levels:
                values = triton_load(tables["levels"].at[code], mask=mask, other=0) * scale
            else:
                values = (code.astype(jnp.float32) - zero) * scale
            column = matrix.columns(at, plane)
            rows = triton_load(x_ref.at[row[:, None], column[None, :]], mask=live[:, None] & there[None, :], other=0)
            sums += lax.dot_general(
                rows,
                values.astype(matrix.dtype),
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
        return sums

    sums = lax.fori_loop(0, steps, add_block, jnp.zeros((MOST_ROWS, BLOCK_OUT), jnp.float32))
    triton_store(out_ref.at[part, row[:, None], output[None, :]], sums, mask=live[:, None] & inside[None, :])
