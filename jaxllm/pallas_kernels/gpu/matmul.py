"""Products with weights as they are stored, on NVIDIA GPUs: how they are cut into programs, and two kernels of them.

One program per (block of outputs, tile of rows or part of the inputs). A tile is up to `tile_rows` rows of one group,
so that a program multiplies by one matrix; it walks that matrix's inputs a step at a time, and expands codes in
registers. Rows are read and written where they are, by the list of their group; no weight is copied, transposed or
expanded in memory, and only those of groups that have rows are read. The parts of long rows are walked side by side,
and the kernel that reads their sums adds them up.

`matmul` is for floats, and for codes and many rows: with 128 rows and more a group the tensor cores are the limit.
`integer_matmul` is for weights of int8 with a scale a row, and inputs rounded to int8 by runs (W8A8), by a kernel
before it. It multiplies a run at a time by the tensor cores' instructions for integers, whose sums are exact, and adds
them up in float32 by the scales of the run; a weight's own scale comes last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Int8

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.expand import round_to_even
from jaxllm.pallas_kernels.gpu.route import RowLists
from jaxllm.pallas_kernels.matrices import RUN, KernelMatrix, from_e4m3
from jaxllm.pallas_kernels.products import Late, Unsummed, dot

Nonlinearity = Callable[[jax.Array], jax.Array]


class Program(NamedTuple):
    """A program's share of a product.

    Attributes:
        group: whose matrix its rows are multiplied by.
        there: how many rows there are, or 1 where that is not counted; the rest of a tile is not `live`.
        row, x_row: their places in the output, outside it for rows that are not live; and in the inputs.
        part, steps: the part of the output, and the first step over the inputs and the end: several programs may walk
            some of the inputs each.
        block, lane: its block of outputs, and these by number; not all are `inside`.
        matrix_row: the same of all matrices, one after the other.
    """

    group: Array | int
    there: Array | int
    row: Int[Array, "n"]
    x_row: Int[Array, "n"]
    live: Bool[Array, "n"]
    part: Array | int
    steps: tuple[Array | int, Array | int]
    block: Array
    lane: Int[Array, "m"]
    inside: Bool[Array, "m"]
    output: Int[Array, "m"]
    matrix_row: Int[Array, "m"]


class ProductOptions(TypedDict, total=False):
    """See `TileProduct`."""

    activation: Nonlinearity | None
    dtype: Any
    interpret: bool


@dataclass(frozen=True)
class TileProduct:
    """What is static about a product of rows with a matrix, or with each group's of a stack.

    Attributes:
        outputs: of a matrix.
        block_out: outputs of a program.
        tile_rows: rows of a program.
        share: neighbouring rows that share one of the inputs.
        activation: with it the first half of a matrix is a gate, and the result, half as wide, is
            `activation(gate) * up`. A gate's output and the one that it is for are neighbours in a program.
        dtype: of the result, unless rows are walked in parts, which gives float32.
        interpret: the kernel is run as XLA operations, on any platform.
    """

    outputs: int
    block_out: int
    tile_rows: int
    share: int
    activation: Nonlinearity | None = None
    dtype: Any = jnp.float32
    interpret: bool = False

    def program(self, list_refs: Sequence[Any], out_ref: Any, steps: int) -> Program:
        """This program's share of `steps` steps: with `RowLists` of their second tile, else of all rows or inputs."""
        block, second = pl.program_id(0), pl.program_id(1)
        of_tile, (parts, num_rows, _) = jnp.arange(self.tile_rows), out_ref.shape
        group: Array | int = 0
        there: Array | int = 1
        part: Array | int = 0
        mine: tuple[Array | int, Array | int] = 0, steps
        if list_refs:
            tiles_ref, rows_ref = list_refs
            group, first, there = (tiles_ref[second, column] for column in range(3))
            live = of_tile < there
            row = triton_load(rows_ref.at[first + of_tile], mask=live, other=num_rows)
        elif parts == 1:
            row = second * self.tile_rows + of_tile
            live = row < num_rows
        else:
            row, live, part = of_tile, of_tile < num_rows, second
            each = pl.cdiv(steps, parts)
            mine = second * each, jnp.minimum((second + 1) * each, steps)
        lane = block * self.block_out + jnp.arange(self.block_out)
        inside = lane < self.outputs
        output = lane if self.activation is None else lax.rem(lane, 2) * (self.outputs // 2) + lax.div(lane, 2)
        output = jnp.where(inside, output, 0)
        matrix_row = group * self.outputs + output
        x_row = lax.div(row, self.share)
        return Program(group, there, row, x_row, live, part, mine, block, lane, inside, output, matrix_row)

    def add_up(
        self, program: Program, out_ref: Any, add_step: Callable[[Array, Array], Array], *, axis: int = 0,
        finish: Callable[[Array], Array] | None = None,
    ) -> None:  # fmt: skip
        """Stores the sums of a program's steps, and `finish` of them; their outputs lie along an axis."""
        shape = (self.block_out, self.tile_rows) if axis == 0 else (self.tile_rows, self.block_out)

        @pl.when(program.there > 0)
        def _() -> None:
            sums = lax.fori_loop(*program.steps, add_step, jnp.zeros(shape, jnp.float32))
            sums = sums if finish is None else finish(sums)
            place, inside = program.lane, program.inside
            if self.activation is not None:
                gate, up = neighbours(sums, axis)
                sums = self.activation(gate) * up
                place = program.block * sums.shape[axis] + jnp.arange(sums.shape[axis])
                inside = place < out_ref.shape[2]
            row, live = (jnp.expand_dims(vector, axis) for vector in (program.row, program.live))
            place, inside = (jnp.expand_dims(vector, 1 - axis) for vector in (place, inside))
            triton_store(out_ref.at[program.part, row, place], sums.astype(out_ref.dtype), mask=live & inside)


def neighbours(x: Float[Array, "n m"], axis: int) -> tuple[Array, Array]:
    """The even and the odd rows (axis 0) or columns (1)."""
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    even = jnp.expand_dims(jnp.arange(2) == 0, (0, 2) if axis == 0 else (0, 1))
    return jnp.sum(jnp.where(even, pairs, 0), axis=axis + 1), jnp.sum(jnp.where(even, 0, pairs), axis=axis + 1)


def launch(
    name: str, kernel: Callable[..., None], x: Array, arrays: Sequence[Array], lists: RowLists | None, rows: int,
    product: TileProduct, *, parts: int = 1, warps: int, stages: int,
) -> Late:  # fmt: skip
    """Runs `kernel(list_refs, refs of x and arrays, out_ref, product)` for each program of a product.

    Without `lists`, rows are those of `x`, tile by tile, or in several `parts` of one tile, which are `Unsummed` then.
    """
    given = () if lists is None else (lists.tiles, lists.rows)
    wide = product.outputs if product.activation is None else product.outputs // 2
    tiles = pl.cdiv(rows, product.tile_rows) if lists is None else len(lists.tiles)

    def body(*refs: Any) -> None:
        kernel(refs[: len(given)], refs[len(given) : -1], refs[-1], product)

    sums = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), jnp.float32 if parts > 1 else product.dtype),
        grid=(pl.cdiv(product.outputs, product.block_out), max(tiles, parts)),
        interpret=product.interpret,
        compiler_params=triton_compiler_params(warps, stages),
        name=name,
    )(*given, x, *arrays)
    return sums[0] if parts == 1 else Unsummed(sums)


MAX_TILE_ROWS = 128
BLOCK_OUT = 128
MAX_STAGES = 4
SHARED_BYTES = 96 * 1024
"""Of shared memory that a block of threads can have everywhere: 99 KiB on sm_86 and sm_89, 227 KiB on sm_90."""


def choose_tile_rows(num_rows: int, num_groups: int) -> int:
    """The power of two that holds an average group, and no fewer than the 16 that tensor cores take."""
    return min(MAX_TILE_ROWS, max(16, pl.next_power_of_2(pl.cdiv(num_rows, num_groups))))


def matmul(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    **options: Unpack[ProductOptions],
) -> Float[Array, "N o"]:
    """`x @ matrix.T`, or with `lists` `x[r // (N // n)] @ matrix[group of r].T`; summed in float32.

    Of the `rows` N those without a group are anything. The experts of a token, whose rows lie side by side, read the
    one row of it. For the options see `TileProduct`.
    """
    rows = x.shape[0] if lists is None else rows
    codes = matrix.codes.reshape(-1, matrix.codes.shape[-1])
    if codes.dtype == jnp.float8_e4m3fn:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    outputs = matrix.shape[-2]
    tile_rows = choose_tile_rows(rows, len(codes) // outputs)
    tables = {name: table.reshape(-1) for name, table in matrix.tables.items()}
    return launch(
        "matmul_of_tiles", functools.partial(_kernel, matrix=matrix, names=tuple(tables)), x.astype(matrix.dtype),
        [codes, *tables.values()], lists, rows,
        TileProduct(outputs, BLOCK_OUT, tile_rows, rows // x.shape[0], **options),
        warps=8 if tile_rows > 64 else 4, stages=_stages(matrix, tile_rows),
    )  # fmt: skip


def _stages(matrix: KernelMatrix, tile_rows: int) -> int:
    """Steps loaded ahead: their inputs and codes (and what codes become) fit into any GPU's shared memory."""
    step, number = block_stored(matrix), jnp.dtype(matrix.dtype).itemsize
    code = jnp.dtype(matrix.codes.dtype).itemsize
    inputs = tile_rows * step * matrix.planes * number
    weights = BLOCK_OUT * step * code
    expanded = 0 if matrix.scale is None else BLOCK_OUT * step * matrix.planes * number
    # What is loaded ahead takes registers for its addresses.
    most = MAX_STAGES - (matrix.planes > 1 and tile_rows > 64) - (matrix.planes > 2)
    return max(2, min(most, (SHARED_BYTES - expanded) // (inputs + weights)))


def _kernel(
    list_refs: Sequence[Any], refs: Sequence[Any], out_ref: Any, product: TileProduct, *, matrix: KernelMatrix,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    x_ref, codes_ref, *table_refs = refs
    tables = dict(zip(names, table_refs, strict=True))
    stored, step = codes_ref.shape[1], block_stored(matrix)
    program = product.program(list_refs, out_ref, pl.cdiv(stored, step))
    live, inside, matrix_row = program.live, program.inside, program.matrix_row

    def add_step(index: Array, sums: Array) -> Array:
        at = index * step + jnp.arange(step)
        there = (at < stored)[None, :]
        codes = triton_load(codes_ref.at[matrix_row[:, None], at[None, :]], mask=inside[:, None] & there, other=0)
        for plane in range(matrix.planes):
            column = matrix.columns(at, plane)
            weights = _expand(codes, plane, matrix_row, index * step, inside, stored, matrix, tables)
            rows = triton_load(
                x_ref.at[program.x_row[:, None], column[None, :]], mask=live[:, None] & there, other=0
            )  # fmt: skip
            sums += dot(rows, weights)
        return sums

    def scaled(sums: Array) -> Array:
        if not matrix.scales_whole_rows:
            return sums
        scale = triton_load(tables["scale"].at[lax.div(matrix_row, matrix.scale_rows)], mask=inside, other=0)
        return sums * scale.astype(jnp.float32)[None, :]

    product.add_up(program, out_ref, add_step, axis=1, finish=scaled)


def block_stored(matrix: KernelMatrix) -> int:
    """Stored numbers of a row that are multiplied at a time: fewer where expanding them takes registers, or they do."""
    itemsize = jnp.dtype(matrix.codes.dtype).itemsize
    return {1: 64 // matrix.planes, 2: 64, 4: 16}[itemsize]


def _expand(
    codes: Array, plane: int, row: Array, begin: Array, inside: Array, stored: int, matrix: KernelMatrix, tables: Any
) -> Array:
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

    def table(name: str) -> Array:
        return triton_load(tables[name].at[where], mask=mask, other=0).astype(jnp.float32)

    if matrix.levels:
        values = triton_load(tables["levels"].at[codes], mask=jnp.broadcast_to(mask, codes.shape), other=0)
    else:
        values = codes.astype(jnp.float32) - (matrix.middle if matrix.zero is None else table("zero"))
    if not matrix.scales_whole_rows:
        values *= table("scale")
    return values.astype(matrix.dtype)


class IntegerTiling(NamedTuple):
    """How products of integers are cut into programs.

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
PART_STEPS = 4
ROUNDED_RUNS = 16


def integer_matmul(
    x: Float[Array, "n i"],
    matrix: KernelMatrix,
    lists: RowLists | None = None,
    rows: int = 0,
    tile_rows: int = 0,
    **options: Unpack[ProductOptions],
) -> Float[Array, "N o"] | Unsummed:
    """As `matmul`, with `x` rounded; `lists` are of tiles of `tile_rows`, and rows may be walked in parts."""
    outputs, inputs = matrix.shape[-2:]
    rows = x.shape[0] if lists is None else rows
    size = tile_rows or min(MAX_TILE_ROWS, max(16, pl.next_power_of_2(rows)))
    tiling = FEW if size <= 32 else MANY
    blocks = pl.cdiv(outputs, tiling.block_out)
    runs = tiling.runs if inputs % (tiling.runs * RUN) == 0 else 1  # with a mask, where rows are no whole steps
    parts = 1
    if lists is None and rows <= size:
        parts = max(1, min(tiling.programs // blocks, pl.cdiv(inputs, RUN * runs) // PART_STEPS))
    codes, scale = round_runs(x, interpret=options.get("interpret", False))
    return launch(
        "matmul_of_integers", functools.partial(_integer_kernel, runs=runs), codes,
        [scale, matrix.codes.reshape(-1, inputs), matrix.scale.reshape(-1)], lists, rows,
        TileProduct(outputs, tiling.block_out, size, rows // x.shape[0], **options), parts=parts,
        warps=tiling.warps if size != 64 else 4, stages=tiling.stages,
    )  # fmt: skip


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


def _integer_kernel(
    list_refs: Sequence[Any], refs: Sequence[Any], out_ref: Any, product: TileProduct, *, runs: int
) -> None:  # fmt: skip
    x_ref, x_scale_ref, codes_ref, scale_ref = refs
    inputs = codes_ref.shape[1]
    program = product.program(list_refs, out_ref, x_scale_ref.shape[1] // runs)
    matrix_row, live, size = program.matrix_row, program.live, product.tile_rows

    def add_run(run: Array, sums: Array) -> Array:
        at = run * RUN + jnp.arange(RUN)
        if inputs % RUN == 0:
            codes = codes_ref[matrix_row[:, None], at[None, :]]
            mask = jnp.broadcast_to(live[:, None], (size, RUN))
        else:
            there = jnp.broadcast_to((at < inputs)[None, :], (product.block_out, RUN))
            codes = triton_load(codes_ref.at[matrix_row[:, None], at[None, :]], mask=there, other=0)
            mask = live[:, None] & (at < inputs)[None, :]
        given = triton_load(x_ref.at[program.x_row[:, None], at[None, :]], mask=mask, other=0)
        scale = triton_load(x_scale_ref.at[program.x_row, jnp.broadcast_to(run, (size,))], mask=live, other=0)
        sums_of_run = lax.dot_general(codes, given, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return sums + sums_of_run.astype(jnp.float32) * scale[None, :]

    def add_step(index: Array, sums: Array) -> Array:
        for run in range(runs):
            sums = add_run(index * runs + run, sums)
        return sums

    product.add_up(program, out_ref, add_step, finish=lambda sums: sums * scale_ref[matrix_row][:, None])
