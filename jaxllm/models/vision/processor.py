"""From an image to a tower's patches, and from a prompt with placeholders to one with a token for each row.

NumPy and Pillow alone: a process that serves HTTP need not import JAX for this. A family is a subclass that says how an
image is resized and cut (`plan`), and which tokens stand around its rows (`pieces`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from PIL import Image

from jaxllm.errors import InvalidRequestError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
NO_MEAN, NO_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

Size = tuple[int, int]  # height, width
ImageOptions = Mapping[str, Any]  # preprocessor_config.json, or what a request says instead
Encode = Callable[[str], Sequence[int]]  # a tokenizer's, which knows special tokens and adds none


class Grid(NamedTuple):
    """Parts of an image that see themselves alone, each a raster of patches.

    Attributes:
        tiles: the height and width of each, in patches.
        cut: rows and columns of tiles into which the image is cut; the whole image follows them as one more tile.
    """

    tiles: tuple[Size, ...]
    cut: Size = (1, 1)

    @property
    def patches(self) -> int:
        return sum(height * width for height, width in self.tiles)


class Cutting(NamedTuple):
    """The pixels of an image: `sizes` it is resized to in turn, what is cut out of its middle, its tiles."""

    sizes: tuple[Size, ...]
    crop: Size | None = None
    cut: Size = (1, 1)
    whole: Size | None = None  # one more tile, of the whole image
    whole_of_last: bool = False  # it is made of the image as resized, not as given


class Expanded(NamedTuple):
    """A prompt in which each image has its tokens.

    Attributes:
        ids: T tokens.
        rows: which row of all images' together takes the place of each token's embedding; -1 is none.
        spans: the first and the last but one of each image's tokens.
        visible_until: the last token that each one sees; None where that is itself.
        places: time, height and width by which tokens are rotated; None where that is their position.
        delta: what is added to the position of a later token to have its place.
    """

    ids: list[int]
    rows: Int[np.ndarray, "T"]
    spans: list[tuple[int, int]]
    visible_until: Int[np.ndarray, "T"] | None
    places: Int[np.ndarray, "3 T"] | None
    delta: int


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One family's handling of images.

    Attributes:
        image: the token of each row.
        placeholder: the token that a chat template writes for an image.
        merge: a row is made of that many patches each way.
        order: of a patch's numbers: channels first, or last.
        frames: a still image is repeated that often in each patch.
        both_ways: tokens of an image see each other.
        axes: tokens are rotated by time, height and width.
    """

    image: int
    placeholder: int
    patch: int
    merge: int
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    scale: float = 1 / 255
    resample: int = Image.Resampling.BICUBIC
    order: Literal["first", "last"] = "first"
    frames: int = 1
    both_ways: bool = False
    axes: bool = False
    encode: Encode = field(default=lambda text: (), repr=False, compare=False)

    def plan(self, height: int, width: int) -> Cutting:
        """Raises InvalidRequestError for an image of a shape that the family does not take."""
        raise NotImplementedError

    def pieces(self, grid: Grid) -> list[int | Sequence[int]]:
        """An image in a prompt: numbers of rows, and other tokens between them."""
        return [self.rows(grid)]

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        """The same with other limits on an image's rows, where the family has any to set."""
        return self

    def grid(self, height: int, width: int) -> Grid:
        """The grid of an image of that many pixels."""
        plan = self.plan(height, width)
        (height, width), (rows, columns) = plan.crop or plan.sizes[-1], plan.cut
        tiles = [(height // rows, width // columns)] * (rows * columns) + ([plan.whole] if plan.whole else [])
        return Grid(tuple((h // self.patch, w // self.patch) for h, w in tiles), plan.cut)

    def rows(self, grid: Grid) -> int:
        """The rows that an image has in the text."""
        return grid.patches // self.merge**2

    def patches(self, image: Image.Image) -> Float[np.ndarray, "P D"]:
        """The patches of an RGB image, its tiles one after the other, each row by row."""
        plan = self.plan(image.height, image.width)
        (rows, columns), last = plan.cut, image
        for size in plan.sizes:
            last = resized(last, size, self.resample)
        if plan.crop is not None:
            top, left = ((a - b) // 2 for a, b in zip((last.height, last.width), plan.crop, strict=True))
            last = last.crop((left, top, left + plan.crop[1], top + plan.crop[0]))
        height, width = last.height // rows, last.width // columns
        parts = [
            last.crop((width * column, height * row, width * (column + 1), height * (row + 1)))
            for row in range(rows)
            for column in range(columns)
        ]
        if plan.whole is not None:
            parts.append(resized(last if plan.whole_of_last else image, plan.whole, self.resample))
        return np.concatenate([self._patches(np.asarray(part)) for part in parts])

    def _patches(self, pixels: np.ndarray) -> Float[np.ndarray, "P D"]:
        values: np.ndarray = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        values = (values - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        height, width, size = values.shape[0] // self.patch, values.shape[1] // self.patch, self.patch
        patches = values.reshape(height, size, width, size, 3).swapaxes(1, 2).reshape(height * width, size, size, 3)
        if self.order == "first":
            patches = np.repeat(np.moveaxis(patches, 3, 1)[:, :, None], self.frames, axis=2)
        return patches.reshape(height * width, -1)

    def expand(self, ids: Sequence[int], grids: Sequence[Grid]) -> Expanded:
        """Put each image's tokens in the place of its placeholder.

        Raises InvalidRequestError: there are more or fewer placeholders than images.
        """
        if (found := list(ids).count(self.placeholder)) != len(grids):
            raise InvalidRequestError(f"the prompt has {found} places for images, and the request {len(grids)} images")
        out: list[int] = []  # rows are -1
        spans, rest, grid_of = [], list(reversed(ids)), iter(grids)
        while rest:
            if (token := rest.pop()) != self.placeholder:
                out.append(token)
                continue
            first, *middle = self.pieces(next(grid_of))
            parts = [[-1] * piece if isinstance(piece, int) else list(piece) for piece in (first, *middle)]
            if count := self._newlines.get(tuple(parts[0]), 0):  # a tokenizer has one token for several ends of lines
                parts[0] = self._joined(count, out)
            if middle and (count := self._newlines.get(tuple(parts[-1]), 0)):
                parts[-1] = self._joined(count, rest)
            spans.append((len(out), len(out) + sum(map(len, parts))))
            out += [token for part in parts for token in part]
        mask = np.asarray(out) == -1
        out = [self.image if token == -1 else token for token in out]
        rows = np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32)
        places, delta = rope_places(mask, spans, grids, self.merge) if self.axes else (None, 0)
        return Expanded(out, rows, spans, visible_until(mask) if self.both_ways else None, places, delta)

    def _joined(self, count: int, beside: list[int]) -> list[int]:
        """That many ends of lines and those `beside` them, which are taken from there."""
        while beside and (beside[-1],) in self._newlines:
            count += self._newlines[(beside.pop(),)]
        return list(self.encode("\n" * count))

    @functools.cached_property
    def _newlines(self) -> dict[tuple[int, ...], int]:
        """Tokens that are ends of lines, and how many."""
        return {tuple(found): count for count in range(1, 9) if (found := self.encode("\n" * count))}


def resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    """`image` with another height and width, its rows first, as Pillow before 13 and torchvision do."""
    height, width = size
    if image.width != width:
        image = image.resize((width, image.height), resample)
    return image if image.height == height else image.resize((width, height), resample)


def visible_until(is_row: Bool[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
    """The last token that each one sees: of a run of rows the last one, otherwise itself.

    Worked example: text, three rows, text -> 0 3 3 3 4
    """
    places = np.arange(len(is_row))
    last = np.where(is_row & np.append(is_row[1:], False), len(is_row), places)
    return np.minimum.accumulate(last[::-1])[::-1].astype(np.int32)


def rope_places(
    is_row: Bool[np.ndarray, "T"], spans: Sequence[tuple[int, int]], grids: Sequence[Grid], merge: int
) -> tuple[Int[np.ndarray, "3 T"], int]:
    """Time, height and width of each token, and what to add to a later token's position (arXiv:2409.12191).

    Worked example: a word, an image of one row and two columns, a word -> T 0 1 1 3, H 0 1 1 3, W 0 1 2 3, and 0.
    """
    parts, position, done = [], 0, 0
    for (begin, end), grid in zip(spans, grids, strict=True):
        first = begin + int(np.argmax(is_row[begin:end]))
        parts.append(np.tile(position + np.arange(first - done), (3, 1)))
        position += first - done
        height, width = (side // merge for side in grid.tiles[0])
        places = np.stack(np.unravel_index(np.arange(height * width), (1, height, width)))
        parts.append(position + places)
        position, done = position + max(height, width), first + height * width
    parts.append(np.tile(position + np.arange(len(is_row) - done), (3, 1)))
    places = np.concatenate(parts, axis=1).astype(np.int32)
    return places, position - done


@dataclass(frozen=True, kw_only=True)
class FixedProcessor(Processor):
    """Every image has one size: its shape is not kept, or its shortest edge is resized and its middle taken."""

    size: Size = (224, 224)
    shortest: int | None = None

    def plan(self, height: int, width: int) -> Cutting:
        if self.shortest is None:
            return Cutting((self.size,))
        short, long = min(height, width), max(height, width)
        other = int(self.shortest * long / short)
        return Cutting(((self.shortest, other) if height <= width else (other, self.shortest),), crop=self.size)


@dataclass(frozen=True, kw_only=True)
class PixelsProcessor(Processor):
    """Sides become multiples of a row's patches, and pixels no fewer and no more than a limit."""

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    axes: bool = True

    def limited(self, min_rows: int | None = None, max_rows: int | None = None) -> Processor:
        cell = (self.patch * self.merge) ** 2
        least = self.min_pixels if min_rows is None else min_rows * cell
        most = self.max_pixels if max_rows is None else max_rows * cell
        return replace(self, min_pixels=min(least, most), max_pixels=most)

    def plan(self, height: int, width: int) -> Cutting:
        unit = self.patch * self.merge
        if max(height, width) > 200 * min(height, width):
            raise InvalidRequestError(f"an image has {width} × {height} pixels; accepted is a ratio of up to 200")
        sides = [round(side / unit) * unit for side in (height, width)]
        if sides[0] * sides[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [max(unit, int(side / shrink / unit) * unit) for side in (height, width)]
        elif sides[0] * sides[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
        return Cutting(((sides[0], sides[1]),))
