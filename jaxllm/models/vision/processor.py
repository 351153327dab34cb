"""From an image to a tower's patches, and from a prompt with placeholders to one with a token for each row.

This needs NumPy and Pillow alone: a process that serves HTTP need not import JAX for it. Subclasses say how an image is
resized and cut (`plan`), and which tokens stand between its rows (`pieces`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from jaxllm.errors import InvalidRequestError
from jaxllm.weights.fields import FLAG, NULL, OBJECT, FieldKind, FieldKinds, check_fields, either, real, whole

if TYPE_CHECKING:
    from PIL import Image

Colours = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of red, green and blue
CLIP: Colours = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF: Colours = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

Size = tuple[int, int]  # height, width
Piece = int | str | tuple[int, ...]  # of an image in a prompt: that many rows, text, or tokens
ImageOptions = Mapping[str, Any]  # preprocessor_config.json, or what a request says instead
Encode = Callable[[str], Sequence[int]]  # a tokenizer's, which knows special tokens and adds none


class Grid(NamedTuple):
    """The tiles of an image, rasters of patches which the tower sees each by itself.

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
    """How an image is resized and cut.

    Attributes:
        sizes: it is resized to these in turn.
        crop: then this is cut out of its middle.
        cut: then it is cut into that many rows and columns of tiles.
        whole: the size of one more tile, of the whole image.
        whole_of_last: that tile is made from the resized image, not from the given one.
    """

    sizes: tuple[Size, ...]
    crop: Size | None = None
    cut: Size = (1, 1)
    whole: Size | None = None
    whole_of_last: bool = False


class Expanded(NamedTuple):
    """A prompt in which each image has its tokens.

    Attributes:
        ids: T tokens.
        rows: which row of all images' together takes the place of each token's embedding; -1 is none.
        spans: the first of each image's tokens, and the end.
        visible_until: the last token that each one sees; None if each sees itself last.
        places: time, height and width by which tokens are rotated; None if that is their position.
        delta: a later token's place is its position plus this.
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
        patch: the side of a patch in pixels.
        merge: a row is made of that many patches each way.
        mean, std: of the colours, by which pixels are normalized after they are multiplied by `scale`.
        resample: Pillow's number of the filter for resizing.
        before, after: what stands around an image's rows.
        order: of a patch's numbers: channels first, or last.
        frames: a still image is repeated that often in each patch.
        both_ways: tokens of an image see each other.
        axes: tokens are rotated by time, height and width.
        encode: a tokenizer's function from text to tokens.
    """

    image: int
    placeholder: int
    patch: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    resample: int
    encode: Encode = field(repr=False, compare=False)
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    order: Literal["first", "last"] = "first"
    frames: int = 1
    both_ways: bool = False
    axes: bool = False

    @property
    def unit(self) -> int:
        """The side of what becomes a row, in pixels."""
        return self.patch * self.merge

    def plan(self, height: int, width: int) -> Cutting:
        """Raises InvalidRequestError for an image of a shape that the family does not take."""
        raise NotImplementedError

    def pieces(self, grid: Grid) -> Sequence[Piece]:
        """An image as it stands in a prompt."""
        return [*self.before, self.rows(grid), *self.after]

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
        """The patches of an RGB image as the tower takes them, its tiles one after the other, each row by row."""
        return self.normalized(self.pixels(image))

    def pixels(self, image: Image.Image) -> UInt8[np.ndarray, "P s s 3"]:
        """The pixels of these patches."""
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
        return np.concatenate([self._cut(np.asarray(part)) for part in parts])

    def _cut(self, pixels: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "P s s 3"]:
        size = self.patch
        height, width = pixels.shape[0] // size, pixels.shape[1] // size
        return pixels.reshape(height, size, width, size, 3).swapaxes(1, 2).reshape(height * width, size, size, 3)

    def normalized(self, pixels: UInt8[np.ndarray, "P s s 3"]) -> Float[np.ndarray, "P D"]:
        """Patches of `pixels` as the tower takes them."""
        values: np.ndarray = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        values = (values - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        if self.order == "first":
            values = np.repeat(np.moveaxis(values, 3, 1)[:, :, None], self.frames, axis=2)
        return values.reshape(len(values), -1)

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
            parts = [self._tokens(piece) for piece in self.pieces(next(grid_of))]
            if count := self._newlines.get(tuple(parts[0]), 0):  # a tokenizer has one token for several ends of lines
                parts[0] = self._joined(count, out)
            if len(parts) > 1 and (count := self._newlines.get(tuple(parts[-1]), 0)):
                parts[-1] = self._joined(count, rest)
            spans.append((len(out), len(out) + sum(map(len, parts))))
            out += [token for part in parts for token in part]
        mask = np.asarray(out) == -1
        out = [self.image if token == -1 else token for token in out]
        rows = np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32)
        places, delta = rope_places(mask, spans, grids, self.merge) if self.axes else (None, 0)
        return Expanded(out, rows, spans, visible_until(mask) if self.both_ways else None, places, delta)

    def _tokens(self, piece: Piece) -> list[int]:
        return [-1] * piece if isinstance(piece, int) else list(self.encode(piece) if isinstance(piece, str) else piece)

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


_COLOURS = FieldKind("three numbers", lambda value: isinstance(value, list | tuple) and len(value) == 3)
_PIXELS = whole(1, 2**31)
_FIELDS: FieldKinds = {
    **dict.fromkeys(("image_mean", "image_std"), either(_COLOURS, NULL)),
    **dict.fromkeys(("do_normalize", "do_image_splitting", "crop_to_patches"), either(FLAG, NULL)),
    **dict.fromkeys(("min_pixels", "max_pixels"), either(_PIXELS, NULL)),
    **dict.fromkeys(("min_patches", "max_patches"), whole(1, 2**10)),
    **dict.fromkeys(("size", "max_image_size"), either(OBJECT, NULL)),
    "rescale_factor": either(real(0, 1e3), NULL), "resample": either(whole(0, 5), NULL),
    "max_soft_tokens": whole(1, 2**16),
}  # fmt: skip
_SIZES = dict.fromkeys(("height", "width", "shortest_edge", "longest_edge"), either(_PIXELS, NULL))


def pixel_fields(p: ImageOptions, colours: Colours, resample: int) -> dict[str, Any]:
    """A Processor's fields of pixels from preprocessor_config.json, or these where it has none.

    Raises CheckpointError for values that are not valid.
    """
    check_fields(p, _FIELDS)
    for name in ("size", "max_image_size"):
        check_fields(p.get(name) or {}, _SIZES, f"{name}.")
    mean, std = p.get("image_mean") or colours[0], p.get("image_std") or colours[1]
    if p.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    given = p.get("resample")
    return {
        "mean": tuple(mean), "std": tuple(std), "scale": p.get("rescale_factor") or 1 / 255,
        "resample": resample if given is None else given,
    }  # fmt: skip
