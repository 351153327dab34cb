"""How a kernel reads tiles of few bits and expands them, while it is traced."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxllm.compat import triton_load
from jaxllm.pallas_kernels.gpu.expand import expand, multiply_add
from jaxllm.pallas_kernels.matrices import ROWS, SCALES, PackedMatrix, block_scale, group_scale
from jaxllm.pallas_kernels.products import dot

Array = jax.Array


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into programs.

    Attributes:
        warps: of a program, each with 16 outputs of a tile.
        tiles: of `16 * warps` outputs, that a program walks at once.
        step: inputs that are loaded at a time, if rows are whole ones of it, or no whole tiles.
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


def arrays_by_name(matrix: PackedMatrix) -> dict[str, jax.Array]:
    """What a kernel is given of a matrix; of a stack of them, the tiles of one after the other."""
    halves = {f"half {index}": half for index, half in enumerate(matrix.halves)}
    arrays = {"low": matrix.low, "high": matrix.high, "words": matrix.words, **halves}
    found = {name: array for name, array in arrays.items() if array is not None}
    if matrix.low.ndim == 4:
        return found
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in found.items()}


def step_of(inputs: int, matrix: PackedMatrix, wanted: int) -> int:
    """The largest step of whole units that divides rows, no larger than `wanted` if possible.

    Rows that are no whole units end within a step, of any size.
    """
    unit = matrix.format.unit
    most = max(1, wanted // unit)
    return unit * next((n for n in range(most, 0, -1) if inputs % (unit * n) == 0), most)


class Walk:
    """A program's walk over its inputs, while a kernel is traced."""

    def __init__(
        self, given: dict[str, Any], matrix: PackedMatrix, tiling: Tiling, step: int, places: list[Array], plain: bool
    ) -> None:
        self.given, self.matrix, self.tiling, self.step = given, matrix, tiling, step
        self.places, self.plain, self.format = places, plain, matrix.format
        self.kind = SCALES[self.format.scales]
        self.lane = lax.rem(jnp.arange(ROWS * tiling.warps), ROWS)
        self.byte = jnp.arange(self.format.width)

    def __call__(self, x_ref: Any, x_row: Array, live: Array, first: Array, steps: int) -> tuple[Array, ...]:
        """Sums `[outputs of a tile, rows]` of each place over steps `first … first + steps`."""
        inputs = x_ref.shape[1]
        most = pl.cdiv(inputs, self.step)
        end = jnp.minimum(first + steps, most)
        nothing = tuple(jnp.zeros((len(self.lane), len(x_row)), jnp.float32) for _ in self.places)

        def load_rows(index: Array, start: int) -> Array:
            begin = index * self.step + start
            column = begin + self.byte
            inside = live if start < (inputs % self.step or self.step) else live & (begin < inputs)
            mask = jnp.broadcast_to(inside[:, None], (len(x_row), len(column)))
            return triton_load(x_ref.at[x_row[:, None], column[None, :]], mask=mask, other=0)

        add = functools.partial(self._add_scaled if self.tiling.scaled else self._add, load_rows)
        if not self.tiling.ahead:
            return lax.fori_loop(first, end, lambda index, sums: add(index, sums, self.scales(index)), nothing)

        def body(index: Array, carry: Any) -> Any:
            sums, scales = carry
            following = self.scales(jnp.minimum(index + 1, end - 1))
            return add(index, sums, scales), following

        return lax.fori_loop(first, end, body, (nothing, self.scales(jnp.minimum(first, most - 1))))[0]

    def scales(self, index: Array) -> tuple[tuple[Array, ...], ...]:
        """For each place: the words, then the halves, of each block of a step."""
        blocks = self.step // self.format.block
        halves = [ref for name, ref in self.given.items() if name.startswith("half")]
        table = halves[0] if halves else self.given["words"]
        return tuple(
            tuple(
                array
                for at in (_in_row(table, index, blocks, number) for number in range(blocks))
                for array in (
                    *(self.given["words"][place, at, word, self.lane] for word in range(self.kind.words)),
                    *(half[place, at, self.lane] for half in halves),
                )
            )
            for place in self.places
        )

    def codes(self, name: str, index: Array) -> list[list[Array]]:
        """For each place: the tiles of a plane that a step needs."""
        if name not in self.given:
            return [[] for _ in self.places]
        ref, count = self.given[name], self.step // self.format.tile_inputs(0 if name == "low" else 1)
        return [
            [
                ref[place[:, None], _in_row(ref, index, count, number), self.lane[:, None], self.byte[None, :]]
                for number in range(count)
            ]
            for place in self.places
        ]

    def _numbers(self, low: list[Array], high: list[Array], number: int) -> Array:
        tile, shift = self.format.place(number, 0)
        high_tile, high_shift = self.format.place(number, 1) if high else (0, 0)
        plane = high[high_tile] if high else None
        return expand(self.format, low[tile], plane, shift, high_shift, self.matrix.dtype, plain=self.plain)

    def scaled(self, low: list[Array], high: list[Array], scales: tuple[Array, ...], number: int) -> Array:
        """The `number`th `width` inputs' weights in the model's type."""
        start = number * self.format.width
        numbers = self._numbers(low, high, number).astype(jnp.float32)
        scale, shift = self._group_scale(scales, start)
        if self.format.scales == "zero":  # the difference of codes is exact, that of products would not be
            _, (_, zero) = self._of_block(scales, start)
            return ((numbers - zero.astype(jnp.float32)[:, None]) * scale[:, None]).astype(self.matrix.dtype)
        if self.kind.blocks:
            whole, whole_shift = block_scale(self.format, *self._of_block(scales, start))
            scale = scale * whole
            shift = None if shift is None or whole_shift is None else shift * whole_shift
        if shift is None:
            numbers = numbers * scale[:, None]
        else:
            spread = jnp.broadcast_to(shift[:, None], numbers.shape)
            numbers = multiply_add(numbers, scale[:, None], spread, plain=self.plain)
        return numbers.astype(self.matrix.dtype)

    def _of_block(self, scales: tuple[Array, ...], start: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        each = self.kind.words + self.kind.halves
        at = start // self.format.block * each
        return scales[at : at + self.kind.words], scales[at + self.kind.words : at + each]

    def _group_scale(self, scales: tuple[Array, ...], start: int) -> tuple[Array, Array | None]:
        words, halves = self._of_block(scales, start)
        return group_scale(
            self.format, words, halves, start % self.format.block // self.format.group, self.matrix.scale
        )

    def _add(self, load_rows: Any, index: Array, sums: tuple[Array, ...], scales: Any) -> tuple[Array, ...]:
        """A step more in the sums; each group's sum is multiplied by its scale, and each block's by its own.

        What is added to a group's numbers is multiplied by the sum of its inputs, which is their product with ones.
        """
        found, format, kind = list(sums), self.format, self.kind
        low, high = self.codes("low", index), self.codes("high", index)
        add = functools.partial(multiply_add, plain=self.plain)
        of_group: list[Any] = [None] * len(found)
        of_block: list[Any] = [None] * len(found)
        shifts: list[Any] = [None] * len(found)
        ones = jnp.ones((len(self.lane), format.width), self.matrix.dtype)
        row_sum: Any = None
        for number in range(self.step // format.width):
            start = number * format.width
            end = start + format.width
            rows = load_rows(index, start)
            for place in range(len(found)):
                product = dot(self._numbers(low[place], high[place], number), rows)
                if kind.shifts and place == 0:  # after a product: before it, it takes registers that are needed
                    row_sum = dot(ones, rows) + (0 if start % format.group == 0 else row_sum)
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
        """A step more in the sums, of weights that are multiplied by their scale first, and rounded as in memory."""
        found, format = list(sums), self.format
        low, high = self.codes("low", index), self.codes("high", index)
        for number in range(self.step // format.width):
            rows = load_rows(index, number * format.width)
            for place in range(len(found)):
                weights = self.scaled(low[place], high[place], scales[place], number)
                found[place] += dot(weights, rows)
        return tuple(found)


def _in_row(ref: Any, index: Array, count: int, number: int) -> Array:
    """Where the `number`th of the `count` tiles or blocks of a step lies in a row.

    After a row's last it is the last once more: a step that goes on there multiplies it by nothing.
    """
    at, there = index * count + number, ref.shape[1]
    return jnp.minimum(at, there - 1) if 0 < there % count <= number else at
