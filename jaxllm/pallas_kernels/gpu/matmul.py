"""Products with weights as they are stored, on NVIDIA GPUs: grouped for experts, and of one matrix of few bits.

One program per (block of outputs, tile of rows). A tile is up to `rows` rows of one group, so that a program multiplies
by one matrix; it walks that matrix's inputs a block at a time and expands codes in registers. Rows are read from where
they are and written where they belong, by the list of their group: nothing is sorted or gathered before. No weight is
copied, transposed or expanded in memory, and only those of groups that have rows are read.

With a few rows a group, memory bandwidth is the limit: the weights are read once. With 128 rows and more a group the
tensor cores are; weights of few bits are then expanded once for each 128 rows.
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
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu import packed
from jaxllm.pallas_kernels.gpu.expand import from_e4m3
from jaxllm.pallas_kernels.gpu.rows import RowLists, neighbours
from jaxllm.pallas_kernels.matrices import KernelMatrix, PackedMatrix
from jaxllm.pallas_kernels.products import dot

MAX_TILE_ROWS = 128
BLOCK_OUT = 128
MAX_STAGES = 4
SHARED_BYTES = 96 * 1024
"""Of shared memory that a block of threads can have everywhere: 99 KiB on sm_86 and sm_89, 227 KiB on sm_90."""


def choose_tile_rows(num_rows: int, num_groups: int) -> int:
    """The power of two that holds an average group, and no fewer than the 16 that tensor cores take."""
    return min(MAX_TILE_ROWS, max(16, pl.next_power_of_2(pl.cdiv(num_rows, num_groups))))


def grouped_matmul(
    x: Float[Array, "n i"],
    matrix: KernelMatrix | PackedMatrix,
    lists: RowLists,
    rows: int,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"]:
    """`x[r // (N // n)] @ matrix[group of r].T` for the `rows` N that have a group; the others' output is anything.

    So that the experts of a token, whose rows lie side by side, read the one row of it. With an `activation` the first
    half of a matrix is a gate, and the result, half as wide, is `activation(gate) * up`. Sums run in float32.
    """
    if isinstance(matrix, PackedMatrix):
        tile_rows = choose_tile_rows(rows, matrix.shape[0])
        options = {"activation": activation, "dtype": dtype, "interpret": interpret}
        return packed.grouped_matmul(x, matrix, lists, rows, tile_rows, **options)
    return _multiply(x, matrix, lists.tiles, lists.rows, rows, activation, dtype, interpret)


def matmul(x: Float[Array, "T i"], matrix: KernelMatrix, *, interpret: bool = False) -> Float[Array, "T o"]:
    """`x @ matrix.T` in float32."""
    tile_rows = choose_tile_rows(x.shape[0], 1)
    first = np.arange(0, x.shape[0], tile_rows)
    tiles = np.stack([np.zeros_like(first), first, np.minimum(x.shape[0] - first, tile_rows)], axis=1)
    return _multiply(x, matrix, jnp.asarray(tiles, jnp.int32), None, x.shape[0], None, jnp.float32, interpret)


def _stages(matrix: KernelMatrix, tile_rows: int) -> int:
    """Steps that are loaded ahead: those whose inputs and codes fit into the shared memory of any GPU.

    Codes that are expanded lie there once more, as what they become.
    """
    step, number = block_stored(matrix), jnp.dtype(matrix.dtype).itemsize
    code = jnp.dtype(matrix.codes.dtype).itemsize
    inputs = tile_rows * step * matrix.planes * number
    weights = BLOCK_OUT * step * code
    expanded = 0 if matrix.scale is None else BLOCK_OUT * step * matrix.planes * number
    # What is loaded ahead takes registers for its addresses.
    most = MAX_STAGES - (matrix.planes > 1 and tile_rows > 64) - (matrix.planes > 2)
    return max(2, min(most, (SHARED_BYTES - expanded) // (inputs + weights)))


def _multiply(
    x: jax.Array, matrix: KernelMatrix, tiles: Int[Array, "tiles 3"], lists: jax.Array | None, rows: int,
    activation: Callable[[jax.Array], jax.Array] | None, dtype: Any, interpret: bool,
) -> jax.Array:  # fmt: skip
    codes = matrix.codes.reshape(-1, matrix.codes.shape[-1])
    if codes.dtype == jnp.float8_e4m3fn:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    outputs = matrix.shape[-2]
    tile_rows = choose_tile_rows(rows, len(codes) // outputs)
    tables = {
        "lists": lists,
        "scale": None if matrix.scale is None else matrix.scale.reshape(-1),
        "zero": None if matrix.zero is None else matrix.zero.reshape(-1),
        "levels": matrix.levels_table,
    }
    given = {name: table for name, table in tables.items() if table is not None}
    return pl.pallas_call(
        functools.partial(
            _kernel,
            matrix=matrix,
            names=tuple(given),
            outputs=outputs,
            tile_rows=tile_rows,
            share=rows // x.shape[0],
            activation=activation,
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs if activation is None else outputs // 2), dtype),
        grid=(pl.cdiv(outputs, BLOCK_OUT), len(tiles)),
        interpret=interpret,
        compiler_params=triton_compiler_params(8 if tile_rows > 64 else 4, _stages(matrix, tile_rows)),
        name="matmul_of_tiles",
    )(tiles, x.astype(matrix.dtype), codes, *given.values())


def _kernel(
    tiles_ref: Any, x_ref: Any, codes_ref: Any, *tables_and_output: Any, matrix: KernelMatrix, names: tuple[str, ...],
    outputs: int, tile_rows: int, share: int, activation: Callable[[jax.Array], jax.Array] | None,
) -> None:  # fmt: skip
    *table_refs, out_ref = tables_and_output
    tables = dict(zip(names, table_refs, strict=True))
    block, tile = pl.program_id(0), pl.program_id(1)
    group, first, count = (tiles_ref[tile, column] for column in range(3))

    @pl.when(count > 0)
    def _() -> None:
        place = first + jnp.arange(tile_rows)
        live = jnp.arange(tile_rows) < count
        lists = tables.get("lists")
        row = place if lists is None else triton_load(lists.at[place], mask=live, other=out_ref.shape[0])
        x_row = lax.div(row, share)
        lane = block * BLOCK_OUT + jnp.arange(BLOCK_OUT)
        inside = lane < outputs
        # A gate's output and the one that it is for are neighbours.
        output = lane if activation is None else lax.rem(lane, 2) * (outputs // 2) + lax.div(lane, 2)
        matrix_row = group * outputs + output
        stored = codes_ref.shape[1]
        step = block_stored(matrix)

        def body(index: Array, acc: Array) -> Array:
            at = index * step + jnp.arange(step)
            codes = triton_load(
                codes_ref.at[matrix_row[:, None], at[None, :]],
                mask=inside[:, None] & (at < stored)[None, :],
                other=0,
            )
            for plane in range(matrix.planes):
                column = matrix.columns(at, plane)
                weights = _expand(codes, plane, matrix_row, index * step, inside, stored, matrix, tables)
                rows = triton_load(
                    x_ref.at[x_row[:, None], column[None, :]],
                    mask=live[:, None] & (at < stored)[None, :],
                    other=0,
                )
                acc += dot(rows, weights)
            return acc

        acc = lax.fori_loop(0, pl.cdiv(stored, step), body, jnp.zeros((tile_rows, BLOCK_OUT), jnp.float32))
        if matrix.scales_whole_rows:
            scale = triton_load(tables["scale"].at[lax.div(matrix_row, matrix.scale_rows)], mask=inside, other=0)
            acc *= scale.astype(jnp.float32)[None, :]
        if activation is not None:
            gate, up = neighbours(acc, 1)
            acc = activation(gate) * up
            output = block * (BLOCK_OUT // 2) + jnp.arange(BLOCK_OUT // 2)
            inside = output < outputs // 2
        triton_store(
            out_ref.at[row[:, None], output[None, :]], acc.astype(out_ref.dtype), mask=live[:, None] & inside[None, :]
        )


def block_stored(matrix: KernelMatrix) -> int:
    """Stored numbers of a row that are multiplied at a time: fewer where expanding them takes registers, or they do."""
    itemsize = jnp.dtype(matrix.codes.dtype).itemsize
    return {1: 64 // matrix.planes, 2: 64, 4: 16}[itemsize]


def _expand(
    codes: Array, plane: int, row: Array, begin: Array, inside: Array, stored: int, matrix: KernelMatrix, tables: Any
) -> Array:
    """A tile's numbers in the type of the product; a scale of whole rows is left to the end."""
    if matrix.codes.dtype == jnp.float8_e4m3fn:
        codes = from_e4m3(codes.astype(jnp.int32))
    elif matrix.planes > 1:
        codes = matrix.codes_in(codes, plane)
    if matrix.scale is None or (matrix.scales_whole_rows and not matrix.levels and not matrix.middle):
        return codes.astype(matrix.dtype)
    group, step = matrix.group_stored, block_stored(matrix)
    scales = stored // group
    at = begin + jnp.arange(1 if group % step == 0 else step)  # one scale a row, where groups are no shorter than steps
    where = lax.div(row, matrix.scale_rows)[:, None] * scales + lax.div(at, group)[None, :]
    mask = inside[:, None] & (at < stored)[None, :]
    if matrix.levels:
        values = triton_load(tables["levels"].at[codes], mask=jnp.broadcast_to(mask, codes.shape), other=0)
    elif matrix.zero is not None:
        values = codes.astype(jnp.float32) - triton_load(tables["zero"].at[where], mask=mask, other=0).astype(
            jnp.float32
        )
    else:
        values = codes.astype(jnp.float32) - matrix.middle
    if not matrix.scales_whole_rows:
        values *= triton_load(tables["scale"].at[where], mask=mask, other=0).astype(jnp.float32)
    return values.astype(matrix.dtype)
