"""Products of few rows with weights of a few bits, on NVIDIA GPUs: each code is read once, many of them at a time.

One program per (block of outputs, part of the inputs, or tile of a group's rows). A program walks its inputs some
groups of codes at a time, loads the next ones meanwhile, and expands codes in registers for the tensor cores. The parts
of long rows are walked side by side, and their sums joined by one more kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load
from jaxllm.pallas_kernels.gpu.rows import RowLists, given_lists, outputs_of_program, rows_of_program, store_sums
from jaxllm.pallas_kernels.matrices import KernelMatrix
from jaxllm.pallas_kernels.products import Unsummed, dot

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
"""The best on an H100, as are the sizes above: benchmarks/results/gpu.md."""


def knows(matrix: KernelMatrix) -> bool:
    """Codes of eight bits or fewer in rows of groups, whose scales are their own and whose bytes are a power of two."""
    grouped = matrix.codes.dtype == jnp.uint8 and matrix.scale is not None and matrix.scale_rows == 1
    return grouped and matrix.group_stored == pl.next_power_of_2(matrix.group_stored)


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
    outputs, stored = matrix.codes.shape[-2:]
    blocks, nbytes = pl.cdiv(outputs, BLOCK_OUT), _block_bytes(matrix)
    rows = x.shape[0] if lists is None else rows
    parts = 1 if lists is not None or blocks > MANY_PROGRAMS else pl.cdiv(pl.cdiv(stored, nbytes), PART_STEPS)
    flat = {"scale": matrix.scale, "zero": matrix.zero}
    given = {name: table.reshape(-1, table.shape[-1]) for name, table in flat.items() if table is not None}
    if matrix.levels_table is not None:
        given["levels"] = matrix.levels_table
    kernel = functools.partial(
        _kernel, matrix=matrix, names=tuple(given), outputs=outputs, nbytes=nbytes, lists=2 * (lists is not None),
        share=rows // x.shape[0], activation=activation,
    )  # fmt: skip
    wide = outputs if activation is None else outputs // 2
    sums = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), jnp.float32 if parts > 1 else dtype),
        grid=(blocks, parts if lists is None else len(lists.tiles)),
        interpret=interpret,
        compiler_params=triton_compiler_params(NUM_WARPS, NUM_STAGES),
        name="few_rows",
    )(*given_lists(lists), x.astype(matrix.dtype), matrix.codes.reshape(-1, stored), *given.values())
    return sums[0] if parts == 1 else Unsummed(sums)


def _block_bytes(matrix: KernelMatrix) -> int:
    return min(BLOCK_BYTES[jnp.dtype(matrix.dtype).itemsize], pl.next_power_of_2(matrix.codes.shape[-1]))


def _kernel(
    *refs: Any, matrix: KernelMatrix, names: tuple[str, ...], outputs: int, nbytes: int, lists: int, share: int,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> None:  # fmt: skip
    *given, out_ref = refs
    list_refs, (x_ref, codes_ref, *table_refs) = given[:lists], given[lists:]
    tables = dict(zip(names, table_refs, strict=True))
    stored = codes_ref.shape[1]
    block, second = pl.program_id(0), pl.program_id(1)
    rows = rows_of_program(list_refs, out_ref, out_ref.shape[1], MOST_ROWS, pl.cdiv(stored, nbytes), second=second)
    mine = outputs_of_program(block, BLOCK_OUT, outputs, gated=activation is not None)
    matrix_row = rows.group * outputs + mine.output
    x_row = lax.div(rows.row, share)
    group = matrix.group_stored
    groups = max(1, nbytes // group)

    def of_groups(name: str, first: Array) -> Array:
        """A table's numbers for the block that begins at byte `first`, one for each byte of it."""
        at = lax.div(first, group) + jnp.arange(groups)
        mask = mine.inside[:, None] & (at < stored // group)[None, :]
        found = triton_load(tables[name].at[matrix_row[:, None], at[None, :]], mask=mask, other=0).astype(jnp.float32)
        return jnp.broadcast_to(found[:, :, None], (BLOCK_OUT, groups, nbytes // groups)).reshape(BLOCK_OUT, nbytes)

    def add_block(index: Array, sums: Array) -> Array:
        first = index * nbytes
        at = first + jnp.arange(nbytes)
        there = at < stored
        mask = mine.inside[:, None] & there[None, :]
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
                x_ref.at[x_row[:, None], column[None, :]], mask=rows.live[:, None] & there[None, :], other=0
            )
            sums += dot(inputs, values.astype(matrix.dtype))
        return sums

    @pl.when(rows.there > 0)
    def _() -> None:
        sums = lax.fori_loop(*rows.steps, add_block, jnp.zeros((MOST_ROWS, BLOCK_OUT), jnp.float32))
        store_sums(out_ref, sums, block, mine, rows, activation, axis=1)
