"""Products with weights of a few bits in tiles, on NVIDIA GPUs: no number of them is ever written to memory.

One program per (some tiles of outputs, tile of rows, part of the inputs). A program walks its inputs a step at a time
while the next ones are loaded, and expands codes in registers to small integers, which 16-bit floats hold exactly.

With a few rows the memory is the limit: a group's products are summed by tensor cores and multiplied by its scale
afterwards, in float32, which is one operation for each row where scaling weights would be one for each weight, and
rounds nothing. With many rows the tensor cores are the limit: weights are scaled first. The parts of long rows are
walked side by side, and their sums joined by one more kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu.expand import expand, multiply_add, ones
from jaxllm.pallas_kernels.gpu.groups import RowLists
from jaxllm.pallas_kernels.packed_matrix import ROWS, SCALES, PackedMatrix, block_scale, group_scale

FEW_ROWS = 16
"""As many as one instruction of the tensor cores multiplies by."""
MOST_ROWS = 128
SOME_ROWS = 64
"""As many as registers hold sums of, for gates and what they are for, and in steps of 256; tiles of more are split."""

LOADED = 128 * 64
"""Numbers of rows that a step may have if several of them are to fit into the shared memory of any GPU."""

GateActivation = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into programs.

    Attributes:
        warps: of a program, each with 16 outputs of a tile.
        tiles: of `16 * warps` outputs, that a program walks at once.
        step: inputs that are loaded at a time, if rows are whole ones of it.
        stages: steps that are on their way.
        programs: rows are parted until there are that many, as far as parts have `least` inputs.
        ahead: whether the scales of a step are loaded during the one before.
        scaled: whether weights are multiplied by their scale before the product.
    """

    warps: int = 4
    tiles: int = 1
    step: int = 256
    stages: int = 3
    programs: int = 1024
    least: int = 1024
    ahead: bool = True
    scaled: bool = False


FEW = Tiling(step=128, programs=512)
MANY = Tiling(warps=8, step=64, stages=3, programs=1, ahead=False, scaled=True)


def matmul(
    x: Float[Array, "T i"],
    matrix: PackedMatrix,
    *,
    dtype: Any = jnp.float32,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "T o"]:
    """`x @ matrix.T`, summed in float32."""
    count = x.shape[0]
    tile_rows = min(MOST_ROWS, max(8, pl.next_power_of_2(count)))
    return _multiply(x, matrix, None, count, tile_rows, None, dtype, tiling, interpret)


def grouped_matmul(
    x: Float[Array, "n i"],
    matrix: PackedMatrix,
    lists: RowLists,
    rows: int,
    tile_rows: int,
    *,
    activation: GateActivation | None = None,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "N o"]:
    """What `matmul.grouped_matmul` gives, of a stack of matrices; lists are of tiles of `tile_rows`."""
    return _multiply(x, matrix, lists, rows, tile_rows, activation, dtype, None, interpret)


def gates(matrix: PackedMatrix) -> bool:
    """Whether the halves of a matrix, gates and what they are for, are whole tiles."""
    return matrix.shape[-2] % (2 * ROWS) == 0


def _multiply(
    x: jax.Array, matrix: PackedMatrix, lists: RowLists | None, rows: int, tile_rows: int,
    activation: GateActivation | None, dtype: Any, tiling: Tiling | None, interpret: bool,
) -> jax.Array:  # fmt: skip
    outputs, inputs = matrix.shape[-2:]
    if tiling is None:
        tiling = _few(matrix, tile_rows) if tile_rows <= FEW_ROWS else MANY
    if activation is not None:
        tiling = replace(tiling, tiles=2)
    step = _step(inputs, matrix, tiling.step)
    split = 2 if tile_rows > SOME_ROWS and (activation is not None or step > tiling.step) else 1
    tile_rows //= split
    if tile_rows * step > LOADED:
        tiling = replace(tiling, stages=1)
    wide = outputs if activation is None else outputs // 2
    blocks = pl.cdiv(wide, ROWS * tiling.warps * (tiling.tiles if activation is None else 1))
    row_tiles = pl.cdiv(rows, tile_rows) if lists is None else len(lists.tiles) * split
    parts = 1
    if lists is None:
        parts = max(1, min(tiling.programs // (blocks * row_tiles), inputs // tiling.least, inputs // step))
    arrays = {
        "low": _stacked(matrix.low, 5),
        "high": _stacked(matrix.high, 5),
        "words": _stacked(matrix.words, 5),
        **{f"half {index}": _stacked(half, 4) for index, half in enumerate(matrix.halves)},
        "tiles": None if lists is None else lists.tiles,
        "rows": None if lists is None else lists.rows,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    sums = pl.pallas_call(
        functools.partial(
            _kernel,
            names=tuple(given),
            matrix=jax.tree.map(lambda _: None, matrix),
            tiling=tiling,
            tile_rows=tile_rows,
            split=split,
            outputs=outputs,
            step=step,
            steps=pl.cdiv(inputs // step, parts),
            share=rows // x.shape[0],
            activation=activation,
            plain=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((parts, rows, wide), dtype if parts == 1 else jnp.float32),
        grid=(blocks, row_tiles, parts),
        interpret=interpret,
        compiler_params=triton_compiler_params(tiling.warps, tiling.stages),
        name="packed_matmul",
    )(x.astype(matrix.dtype), *given.values())
    return sums[0] if parts == 1 else jnp.sum(sums, axis=0).astype(dtype)


def _few(matrix: PackedMatrix, tile_rows: int) -> Tiling:
    """The best of those measured on an H100: docs/gpu.md."""
    if matrix.format.width < 32:  # with four warps a thread has less than the four bytes that can be loaded ahead
        return replace(FEW, warps=2, step=256, stages=2)
    if matrix.format.bits == 8 or (tile_rows > 8 and not matrix.format.has_shift):
        return replace(FEW, warps=2, step=128 if matrix.format.bits == 8 else 256)
    return replace(FEW, ahead=not matrix.format.e2m1)


def _stacked(array: jax.Array | None, axes: int) -> jax.Array | None:
    """One behind the other: the tiles of a stack of matrices."""
    return None if array is None else array.reshape(-1, *array.shape[2 - axes :]) if array.ndim == axes else array


def _step(inputs: int, matrix: PackedMatrix, wanted: int) -> int:
    """The largest that divides rows into whole ones, of whole units, and is no larger than is wanted if that can be."""
    unit = matrix.format.unit
    return next((unit * n for n in range(max(1, wanted // unit), 0, -1) if inputs % (unit * n) == 0), unit)


def _kernel(
    x_ref: Any, *refs: Any, names: tuple[str, ...], matrix: PackedMatrix, tiling: Tiling, tile_rows: int, split: int,
    outputs: int, step: int, steps: int, share: int, activation: GateActivation | None, plain: bool,
) -> None:  # fmt: skip
    *arrays, out_ref = refs
    given = dict(zip(names, arrays, strict=True))
    block, row_tile, part = (pl.program_id(axis) for axis in range(3))
    _, rows, wide = out_ref.shape
    if "tiles" in given:
        group, first, count = (given["tiles"][lax.div(row_tile, split), column] for column in range(3))
        before = lax.rem(row_tile, split) * tile_rows
        first, count = first + before, count - before
    else:
        group, first, count = 0, row_tile * tile_rows, rows - row_tile * tile_rows

    def run() -> None:
        at = first + jnp.arange(tile_rows)
        live = jnp.arange(tile_rows) < count
        row = triton_load(given["rows"].at[at], mask=live, other=rows) if "rows" in given else at
        of_tile = jnp.arange(ROWS * tiling.warps)
        own = outputs // ROWS  # tiles of this group's matrix
        half = own // 2

        def place(index: int) -> Array:
            """The tile of each output that this program's tile `index` is for; after the last, the last."""
            number = block if activation is not None else block * tiling.tiles + index
            number = number * tiling.warps + lax.div(of_tile, ROWS)
            if activation is None:
                return group * own + jnp.minimum(number, own - 1)
            return group * own + index * half + jnp.minimum(number, half - 1)

        walk = _Walk(given, matrix, tiling, step, [place(index) for index in range(tiling.tiles)], plain)
        found = walk(x_ref, lax.div(row, share), live, part * steps, steps)
        if activation is not None:
            gate, up = found
            found = (activation(gate) * up,)
        for index, sums in enumerate(found):
            output = (block * len(found) + index) * len(of_tile) + of_tile
            triton_store(
                out_ref.at[part, row[None, :], output[:, None]],
                sums.astype(out_ref.dtype),
                mask=live[None, :] & (output < wide)[:, None],
            )

    if "tiles" in given:
        pl.when(count > 0)(run)
    else:
        run()


class _Walk:
    """A program's walk over its inputs, while a kernel is traced."""

    def __init__(
        self, given: dict[str, Any], matrix: PackedMatrix, tiling: Tiling, step: int, places: list[Array], plain: bool
    ) -> None:
        self.given, self.matrix, self.tiling, self.step, self.places, self.plain = (
            given, matrix, tiling, step, places, plain,
        )  # fmt: skip
        self.format = matrix.format
        self.kind = SCALES[self.format.scales]
        self.lane = lax.rem(jnp.arange(ROWS * tiling.warps), ROWS)
        self.byte = jnp.arange(self.format.width)

    def __call__(self, x_ref: Any, x_row: Array, live: Array, first: Array, steps: int) -> tuple[Array, ...]:
        """Sums `[outputs of a tile, rows]` of each place over steps `first … first + steps`."""
        most = x_ref.shape[1] // self.step
        end = jnp.minimum(first + steps, most)
        nothing = tuple(jnp.zeros((len(self.lane), len(x_row)), jnp.float32) for _ in self.places)

        def load_rows(column: Array) -> Array:
            mask = jnp.broadcast_to(live[:, None], (len(x_row), len(column)))
            return triton_load(x_ref.at[x_row[:, None], column[None, :]], mask=mask, other=0)

        add = functools.partial(self._add_scaled if self.tiling.scaled else self._add, load_rows)
        if not self.tiling.ahead:
            return lax.fori_loop(first, end, lambda index, sums: add(index, sums, self._scales(index)), nothing)

        def body(index: Array, carry: Any) -> Any:
            sums, scales = carry
            following = self._scales(jnp.minimum(index + 1, most - 1))
            return add(index, sums, scales), following

        return lax.fori_loop(first, end, body, (nothing, self._scales(jnp.minimum(first, most - 1))))[0]

    def _scales(self, index: Array) -> tuple[tuple[Array, ...], ...]:
        """For each place: the words, then the halves, of each block of a step."""
        blocks = self.step // self.format.block
        halves = [ref for name, ref in self.given.items() if name.startswith("half")]
        return tuple(
            tuple(
                array
                for at in (index * blocks + number for number in range(blocks))
                for array in (
                    *(self.given["words"][place, at, word, self.lane] for word in range(self.kind.words)),
                    *(half[place, at, self.lane] for half in halves),
                )
            )
            for place in self.places
        )

    def _codes(self, name: str, index: Array) -> list[list[Array]]:
        """For each place: the tiles of a plane that a step needs."""
        if name not in self.given:
            return [[] for _ in self.places]
        count = self.step // self.format.tile_inputs(0 if name == "low" else 1)
        return [
            [
                self.given[name][place[:, None], index * count + number, self.lane[:, None], self.byte[None, :]]
                for number in range(count)
            ]
            for place in self.places
        ]

    def _numbers(self, low: list[Array], high: list[Array], number: int) -> Array:
        """`code - offset` of the `number`th `width` inputs of a step."""
        tile, shift = self.format.low_place(number)
        high_tile, high_shift = self.format.high_place(number) if high else (0, 0)
        plane = high[high_tile] if high else None
        return expand(self.format, low[tile], plane, shift, high_shift, self.matrix.dtype, plain=self.plain)

    def _of_block(self, scales: tuple[Array, ...], start: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The words and halves of the block that holds input `start` of a step."""
        each = self.kind.words + self.kind.halves
        at = start // self.format.block * each
        return scales[at : at + self.kind.words], scales[at + self.kind.words : at + each]

    def _group_scale(self, scales: tuple[Array, ...], start: int) -> tuple[Array, Array | None]:
        words, halves = self._of_block(scales, start)
        return group_scale(
            self.format, words, halves, start % self.format.block // self.format.group, self.matrix.scale
        )

    def _add(self, load_rows: Any, index: Array, sums: tuple[Array, ...], scales: Any) -> tuple[Array, ...]:
        """A step more in the sums; each group's sum is multiplied by its scale, and each block's by its own."""
        found, format, kind = list(sums), self.format, self.kind
        low, high = self._codes("low", index), self._codes("high", index)
        add = functools.partial(multiply_add, plain=self.plain)
        of_group: list[Any] = [None] * len(found)
        of_block: list[Any] = [None] * len(found)
        shifts: list[Any] = [None] * len(found)
        wide: Any = None
        row_sum: Any = None
        for number in range(self.step // format.width):
            start = number * format.width
            end = start + format.width
            rows = load_rows(index * self.step + start + self.byte)
            if kind.shifts and format.group == format.width and len(rows) > 8:
                row_sum = _product(ones(low[0][0], rows.dtype, plain=self.plain), rows)
            elif kind.shifts:
                wide = rows.astype(jnp.float32) if start % format.group == 0 else wide + rows.astype(jnp.float32)
                row_sum = jnp.sum(wide, axis=1)[None, :] if end % format.group == 0 else None
            for place in range(len(found)):
                product = _product(self._numbers(low[place], high[place], number), rows)
                of_group[place] = product if start % format.group == 0 else of_group[place] + product
                if end % format.group:
                    continue
                scale, shift = self._group_scale(scales[place], start)
                if not kind.blocks:
                    found[place] = add(of_group[place], scale[:, None], found[place])
                    if shift is not None:
                        found[place] = add(shift[:, None], row_sum, found[place])
                    continue
                if start % format.block < format.group:
                    of_block[place] = shifts[place] = jnp.zeros_like(found[place])
                of_block[place] = add(of_group[place], scale[:, None], of_block[place])
                if shift is not None:
                    shifts[place] = add(shift[:, None], row_sum, shifts[place])
                if end % format.block == 0:
                    scale, shift = block_scale(format, *self._of_block(scales[place], start))
                    found[place] = add(of_block[place], scale[:, None], found[place])
                    if shift is not None:
                        found[place] = add(shifts[place], shift[:, None], found[place])
        return tuple(found)

    def _add_scaled(self, load_rows: Any, index: Array, sums: tuple[Array, ...], scales: Any) -> tuple[Array, ...]:
        """A step more in the sums, of weights that are multiplied by their scale first, and rounded as they would be
        if they were expanded in memory."""
        found, format = list(sums), self.format
        low, high = self._codes("low", index), self._codes("high", index)
        for number in range(self.step // format.width):
            start = number * format.width
            rows = load_rows(index * self.step + start + self.byte)
            for place in range(len(found)):
                numbers = self._numbers(low[place], high[place], number).astype(jnp.float32)
                scale, shift = self._group_scale(scales[place], start)
                if self.kind.blocks:
                    whole, whole_shift = block_scale(format, *self._of_block(scales[place], start))
                    scale = scale * whole
                    shift = None if shift is None or whole_shift is None else shift * whole_shift
                if shift is None:
                    numbers = numbers * scale[:, None]
                else:
                    spread = jnp.broadcast_to(shift[:, None], numbers.shape)
                    numbers = multiply_add(numbers, scale[:, None], spread, plain=self.plain)
                found[place] += _product(numbers.astype(self.matrix.dtype), rows)
        return tuple(found)


def _product(numbers: Array, rows: Array) -> Array:
    return lax.dot_general(
        numbers,
        rows,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
