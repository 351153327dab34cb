"""Lays the patches of several images out for a tower: what depends on their shapes, as plain arrays."""

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

    Images are as `Processor.patches` gives them. Padding changes nothing of their rows, which come first.
    """
    table, sizes, widths, merges = config.table, [], [], []
    found: list[Sequence[np.ndarray]] = []
    begin = 0
    for patches, grid in images:
        done = 0
        for height, width in grid.tiles:
            count = height * width
            arrays, merge, own_windows = _tile(config, patches[done : done + count], height, width)
            found.append(arrays)
            sizes.append(len(arrays[0]))
            widths += own_windows
            merges.append(merge + begin)
            begin, done = begin + len(arrays[0]), done + count
    taps = 1 if table is None else table.taps
    shapes = (((config.inputs,), np.float32), ((2,), np.int32), ((taps,), np.int32), ((taps,), np.float32))
    patches, places, index, weight = (
        _padded(np.concatenate([np.zeros((0, *shape), dtype), *parts]), num_patches)
        for (shape, dtype), parts in zip(shapes, zip(*found, strict=True) if found else [()] * 4, strict=True)
    )
    seq_ids, starts = _segments(sizes, num_patches, num_patches // config.patches_per_row)
    windows, window_starts = (None, None)
    if config.window:
        windows, window_starts = _segments(widths, num_patches, num_patches // config.patches_per_row)
    none = np.zeros((0, config.patches_per_row), np.int32)
    merge = _padded(np.concatenate([none, *merges]).astype(np.int32), num_patches // config.patches_per_row)
    return TowerBatch(patches, seq_ids, starts, places, index, weight, merge, windows, window_starts)


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, ((0, length - len(array)), *[(0, 0)] * (array.ndim - 1)))


def _segments(sizes: Sequence[int], length: int, count: int) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "n"]]:
    """Which of up to `count` segments each of `length` patches is of, and where they begin.

    Worked example: sizes 2 and 3, length 6, count 3 -> 0 0 1 1 1 3, and 0 2 5 5.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    seq_ids = _padded(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), length)
    seq_ids[starts[-1] :] = count
    return seq_ids, np.pad(starts, (0, count + 1 - len(starts)), mode="edge")


def _tile(
    config: TowerConfig, patches: Float[np.ndarray, "N D"], height: int, width: int
) -> tuple[list[np.ndarray], Int[np.ndarray, "R m"], list[int]]:
    """A tile's patches, places, taps and weights in their order, the patches of each row, and sizes of windows."""
    side = config.merge
    places = np.stack(np.unravel_index(np.arange(height * width), (height, width)), axis=1).astype(np.int32)
    taps = np.zeros((len(places), 1), np.int32), np.zeros((len(places), 1), np.float32)
    index, weight = taps if config.table is None else table_taps(config.table, height, width)
    cells = np.arange(height * width).reshape(height // side, side, width // side, side).swapaxes(1, 2)
    merge, windows = cells.reshape(-1, side * side), []
    arrays = [patches, places, index, weight]
    if config.window:
        row, column = (places // (side * config.window)).T
        window = row * (column.max() + 1) + column
        order = np.argsort(window, kind="stable")
        windows, arrays = np.bincount(window).tolist(), [array[order] for array in arrays]
        merge = np.argsort(order)[merge]
    if config.table is not None and config.table.class_row:
        arrays = [np.concatenate([np.zeros_like(array[:1]), array]) for array in arrays]
        arrays[2][0], arrays[3][0] = (0, config.table.rows - 1), 1
        merge = merge + 1
    return arrays, merge, windows


def table_taps(
    table: PositionTable, height: int, width: int
) -> tuple[Int[np.ndarray, "N k"], Float[np.ndarray, "N k"]]:
    """Which rows of the table each patch of a raster has, and how much of each."""
    if table.kind == "axes":
        row, column = np.unravel_index(np.arange(height * width), (height, width))
        index = np.stack([column, table.side + row], axis=1)
        return index.astype(np.int32), np.ones(index.shape, np.float32)
    (rows, by_row), (columns, by_column) = (_axis_taps(table, size) for size in (height, width))
    index = rows[:, None, :, None] * table.side + columns[None, :, None, :]
    weight = by_row[:, None, :, None] * by_column[None, :, None, :]
    count = rows.shape[1] ** 2
    index, weight = index.reshape(-1, count), weight.reshape(-1, count)
    if table.class_row:  # whose place and own row are no patch's
        index, weight = (np.pad(array, ((0, 0), (0, 1))) for array in (index + 1, weight))
    return index.astype(np.int32), weight.astype(np.float32)


def _axis_taps(table: PositionTable, size: int) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
    """Places along one side, in float32 as transformers computes them."""
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
