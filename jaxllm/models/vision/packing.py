"""Lays the patches of several images out for a tower: all that depends on the images' shapes, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxllm.models.vision.processor import Grid
from jaxllm.models.vision.tower import PositionTable, TowerBatch, TowerConfig


def packed_patches(config: TowerConfig, grid: Grid) -> int:
    """The patches that an image takes in a batch."""
    return grid.patches + (len(grid.tiles) if config.table is not None and config.table.class_row else 0)


def pack(config: TowerConfig, images: Sequence[tuple[Float[np.ndarray, "_ D"], Grid]], num_patches: int) -> TowerBatch:
    """A batch of `num_patches` with these images and padding; it has a row for each `patches_per_row` of them.

    Images are as `Processor.patches` gives them. Their rows come first, and do not depend on the padding.
    """
    taps, num_rows = 1 if config.table is None else config.table.taps, num_patches // config.patches_per_row
    shapes = ((config.inputs, np.float32), (2, np.int32), (taps, np.int32), (taps, np.float32))
    arrays = [np.zeros((num_patches, size), dtype) for size, dtype in shapes]
    merge = np.zeros((num_rows, config.patches_per_row), np.int32)
    sizes: list[int] = []
    widths: list[int] = []
    begin = row = 0
    for patches, grid in images:
        done = 0
        for height, width in grid.tiles:
            count = height * width
            found, rows, own_windows = _tile(config, patches[done : done + count], height, width)
            sizes.append(len(found[0]))
            widths += own_windows
            for array, part in zip(arrays, found, strict=True):
                array[begin : begin + sizes[-1]] = part
            merge[row : row + len(rows)] = rows + begin
            begin, row, done = begin + sizes[-1], row + len(rows), done + count
    pixels, places, index, weight = arrays
    seq_ids, starts = _segments(sizes, num_patches, num_rows)
    windows, window_starts = _segments(widths, num_patches, num_rows) if config.window else (None, None)
    return TowerBatch(pixels, seq_ids, starts, places, index, weight, merge, windows, window_starts)


def _segments(sizes: Sequence[int], length: int, count: int) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "n"]]:
    """The segment of each of `length` patches, of up to `count` segments, and where each segment begins.

    Worked example: sizes 2 and 3, length 6, count 3 -> 0 0 1 1 1 3, and 0 2 5 5.
    """
    starts = np.cumsum([0, *sizes, *[0] * (count - len(sizes))], dtype=np.int32)
    seq_ids = np.full(length, count, np.int32)
    seq_ids[: starts[-1]] = np.repeat(np.arange(len(sizes)), sizes)
    return seq_ids, starts


def _tile(
    config: TowerConfig, patches: Float[np.ndarray, "N D"], height: int, width: int
) -> tuple[list[np.ndarray], Int[np.ndarray, "R m"], list[int]]:
    """A tile's patches, places, taps and weights in their order, the patches of each row, and sizes of windows."""
    side, table = config.merge, config.table
    cells = np.arange(height * width).reshape(height, width)
    places = np.stack(np.unravel_index(cells.ravel(), cells.shape), axis=1)
    taps = np.zeros((2, len(places), 1)) if table is None else table_taps(table, height, width)
    arrays = [patches, places, *taps]
    merge = cells.reshape(height // side, side, width // side, side).swapaxes(1, 2).reshape(-1, side**2)
    windows = []
    if config.window:
        row, column = (places // (side * config.window)).T
        window = row * (column.max() + 1) + column
        order = np.argsort(window, kind="stable")
        windows, arrays = np.bincount(window).tolist(), [array[order] for array in arrays]
        merge = np.argsort(order)[merge]
    if table is not None and table.class_row:
        arrays = [np.concatenate([np.zeros_like(array[:1]), array]) for array in arrays]
        arrays[2][0], arrays[3][0] = (0, table.rows - 1), 1
        merge = merge + 1
    return arrays, merge, windows


def table_taps(
    table: PositionTable, height: int, width: int
) -> tuple[Int[np.ndarray, "N k"], Float[np.ndarray, "N k"]]:
    """The rows of the table that each patch of a raster takes, and their weights."""
    if table.kind == "axes":
        row, column = np.unravel_index(np.arange(height * width), (height, width))
        index = np.stack([column, table.side + row], axis=1)
        return index.astype(np.int32), np.ones(index.shape, np.float32)
    (rows, by_row), (columns, by_column) = (_axis_taps(table, size) for size in (height, width))
    index = rows[:, None, :, None] * table.side + columns[None, :, None, :]
    weight = by_row[:, None, :, None] * by_column[None, :, None, :]
    count = rows.shape[1] ** 2
    index, weight = index.reshape(-1, count), weight.reshape(-1, count)
    if table.class_row:  # the first row and the last are its alone
        index, weight = (np.pad(array, ((0, 0), (0, 1))) for array in (index + 1, weight))
    return index.astype(np.int32), weight.astype(np.float32)


def _axis_taps(table: PositionTable, size: int) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
    """Taps along one side and their weights, in float32 as transformers computes them."""
    side, place = table.side, np.arange(size, dtype=np.float32)
    if table.kind == "fixed":
        return np.arange(size)[:, None], np.ones((size, 1), np.float32)
    if table.kind == "fraction":
        bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
        where = np.minimum(place * np.float32(1 / np.float32(size)), np.float32(1 - 1e-6))
        return np.searchsorted(bounds, where, side="right")[:, None], np.ones((size, 1), np.float32)
    source = place * np.float32(side - 1) / np.float32(max(size - 1, 1))
    raw = np.floor(source).astype(int)[:, None] + np.arange(2)
    weight = np.maximum(1 - np.abs(source[:, None] - raw.astype(np.float32)), 0)
    return np.clip(raw, 0, side - 1), weight.astype(np.float32)
