"""How each family resizes images and cuts them into tiles, with the arithmetic of transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxllm.errors import InvalidRequestError
from jaxllm.models.vision.processor import Cutting, Grid, Piece, Processor, Size

LONGEST_SIDE = 4096  # in pixels, of what TilesProcessor cuts


@dataclass(frozen=True, kw_only=True)
class FixedProcessor(Processor):
    """Every image gets one size: it is stretched, or its shorter side becomes `shortest` and the middle is cut out."""

    size: Size
    shortest: int | None = None

    def plan(self, height: int, width: int) -> Cutting:
        if self.shortest is None:
            return Cutting((self.size,))
        other = int(self.shortest * max(height, width) / min(height, width))
        return Cutting(((self.shortest, other) if height <= width else (other, self.shortest),), crop=self.size)


@dataclass(frozen=True, kw_only=True)
class PixelsProcessor(Processor):
    """Images keep their shape nearly: sides become multiples of a row's, and the area stays within two limits."""

    min_pixels: int
    max_pixels: int
    axes: bool = True

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        least = self.min_pixels if min_rows is None else min_rows * self.unit**2
        most = self.max_pixels if max_rows is None else max_rows * self.unit**2
        return replace(self, min_pixels=min(least, most), max_pixels=most)

    def plan(self, height: int, width: int) -> Cutting:
        unit, sides = self.unit, (height, width)
        if max(sides) > 200 * min(sides):
            raise InvalidRequestError(f"an image has {width} × {height} pixels; accepted is a ratio of up to 200")
        down, across = (round(side / unit) * unit for side in sides)
        if down * across > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            down, across = (max(unit, int(side / shrink / unit) * unit) for side in sides)
        elif down * across < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            down, across = (math.ceil(side * grow / unit) * unit for side in sides)
        return Cutting(((down, across),))


@dataclass(frozen=True, kw_only=True)
class AreaProcessor(Processor):
    """Images keep their shape nearly, and are scaled, up as well, to the largest size of at most `most` rows."""

    most: int

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        most = max(self.most, min_rows or 0)
        return replace(self, most=most if max_rows is None else min(most, max_rows))

    def plan(self, height: int, width: int) -> Cutting:
        factor = math.sqrt(self.most * self.unit**2 / (height * width))
        down, across = (math.floor(factor * side / self.unit) for side in (height, width))
        if down == 0 and across == 0:
            raise InvalidRequestError(f"images may have {self.most} tokens, which is too few for {width} × {height}")
        if down == 0:
            down, across = 1, min(width // height, self.most)
        elif across == 0:
            down, across = min(height // width, self.most), 1
        return Cutting(((down * self.unit, across * self.unit),))


@dataclass(frozen=True, kw_only=True)
class LinesProcessor(Processor):
    """Images of up to `longest` pixels a side keep their shape, and longer ones are scaled down to that.

    In the prompt the first of `marks` stands between the lines of rows, and the second at the end.
    """

    longest: int
    marks: tuple[str, str] | None

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        """A square image has at most `max_rows`."""
        return self if max_rows is None else replace(self, longest=min(self.longest, self.unit * math.isqrt(max_rows)))

    def plan(self, height: int, width: int) -> Cutting:
        ratio = max(height, width) / self.longest
        sides = (math.floor(side / ratio) if ratio > 1 else side for side in (height, width))
        down, across = ((side - 1) // self.unit * self.unit + self.unit for side in sides)
        return Cutting(((down, across),))

    def pieces(self, grid: Grid) -> Sequence[Piece]:
        if self.marks is None:
            return super().pieces(grid)
        height, width = (side // self.merge for side in grid.tiles[0])
        return [*(width, self.marks[0]) * (height - 1), width, self.marks[1]]


@dataclass(frozen=True, kw_only=True)
class TilesProcessor(Processor):
    """Images are scaled to `longest` pixels and cut into square tiles; the whole image is one more tile.

    Without `split` the whole image is the only one.
    """

    tile: int
    longest: int
    split: bool = True

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        """A square image has at most `max_rows`, or one tile if that has more."""
        if max_rows is None:
            return self
        most = max_rows // (self.tile // self.unit) ** 2 - 1
        longest = min(self.longest, self.tile * math.isqrt(max(most, 0)))
        return replace(self, longest=max(longest, self.tile), split=self.split and longest > 0)

    def plan(self, height: int, width: int) -> Cutting:
        """Images are resized twice: to `longest` and an even number of pixels, then to whole tiles."""
        tile, long, ratio = self.tile, self.longest, width / height
        short = _other_side(long, ratio)
        short += short % 2
        if long > LONGEST_SIDE:
            long, short = LONGEST_SIDE, _other_side(LONGEST_SIDE, ratio)
        first = _oriented(long, max(short, 1), ratio)
        if not self.split:
            return Cutting((first, (tile, tile)))
        long = math.ceil(long / tile)
        short = math.ceil(_other_side(long * tile, first[1] / first[0]) / tile)
        rows, columns = _oriented(long, short, ratio)
        sizes = (first, (rows * tile, columns * tile))
        if long == 1:
            return Cutting(sizes)
        return Cutting(sizes, cut=(rows, columns), whole=(tile, tile), whole_of_last=True)

    def pieces(self, grid: Grid) -> Sequence[Piece]:
        around, each = "<fake_token_around_image>", self.rows(grid) // len(grid.tiles)
        pieces: list[Piece] = []
        rows, columns = grid.cut if len(grid.tiles) > 1 else (0, 0)
        for row in range(rows):
            for column in range(columns):
                end = "\n" if row > 0 and column == 0 else ""
                pieces += [f"{end}{around}<row_{row + 1}_col_{column + 1}>", each]
        end = "\n\n" if rows else ""
        return [*pieces, f"{end}{around}<global-img>", each, around]


def _other_side(long: int, ratio: float) -> int:
    """The shorter side, by the ratio of width to height."""
    return int(long / ratio) if ratio >= 1 else int(long * ratio)


def _oriented(long: int, short: int, ratio: float) -> Size:
    return (short, long) if ratio >= 1 else (long, short)


@dataclass(frozen=True, kw_only=True)
class AspectProcessor(Processor):
    """Images are stretched to between `least` and `most` square tiles, in the arrangement nearest to their shape.

    If there are several, the whole image is one more tile.
    """

    tile: int
    least: int
    most: int

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        if max_rows is None:
            return self
        most = max(1, min(self.most, max_rows // (self.tile // self.unit) ** 2 - 1))
        return replace(self, most=most, least=min(self.least, most))

    def plan(self, height: int, width: int) -> Cutting:
        sides, nearest, best = range(1, self.most + 1), float("inf"), (1, 1)
        shapes = [(w, h) for w in sides for h in sides if self.least <= w * h <= self.most]
        for columns, rows in sorted(shapes, key=math.prod):
            away = abs(width / height - columns / rows)
            if away < nearest or (away == nearest and height * width > 0.5 * self.tile**2 * columns * rows):
                nearest, best = away, (rows, columns)
        rows, columns = best
        whole = (self.tile, self.tile) if rows * columns > 1 else None
        return Cutting(((rows * self.tile, columns * self.tile),), cut=best, whole=whole)
