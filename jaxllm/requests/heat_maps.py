"""Arrays as heat maps in SVG, without a plotting library: what notebooks show of activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

MOST_ROWS, MOST_COLUMNS = 64, 128
"""Cells of a map; where there are more values, a cell is of several."""
_WIDTH, _CELL_HEIGHT, _MARGIN, _LINE = 720, 10, 44, 14
_VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)


class Axis(NamedTuple):
    """What the rows or the columns of a map are, and the label of each."""

    name: str
    labels: Sequence[str]


def root_mean_square(values: np.ndarray, axis: int) -> np.ndarray:
    """float64, the square root of the mean of the squares along an axis."""
    return np.sqrt(np.mean(np.square(values.astype(np.float64)), axis=axis))


def heat_map(title: str, values: np.ndarray, rows: Axis, columns: Axis) -> str:
    """SVG of `[rows, columns]` numbers that are not negative, on a logarithmic scale; each cell tells its value.

    Cells of several rows or columns have the root of the mean of their squares.
    """
    cells, row_labels = _fewer(values.astype(np.float64), rows.labels, MOST_ROWS)
    cells, column_labels = _fewer(cells.T, columns.labels, MOST_COLUMNS)
    cells = cells.T
    positive = cells[np.isfinite(cells) & (cells > 0)]
    least, most = (float(positive.min()), float(positive.max())) if positive.size else (0.0, 0.0)
    height = _CELL_HEIGHT * len(cells)
    width = (_WIDTH - _MARGIN) / max(cells.shape[1], 1)
    parts = [_text(0, _LINE - 3, f"{title}: {least:.3g} (dark) to {most:.3g} (bright), logarithmic")]
    for at, (label, row) in enumerate(zip(row_labels, cells, strict=True)):
        y = _LINE + at * _CELL_HEIGHT
        if at % max(1, math.ceil(len(cells) / 16)) == 0:
            parts.append(_text(0, y + _CELL_HEIGHT - 1, label))
        for place, (column, value) in enumerate(zip(column_labels, row, strict=True)):
            hint = f"{rows.name} {label}, {columns.name} {column}: {value:.4g}"
            at_place = (
                f'x="{_MARGIN + place * width:.1f}" y="{y}" width="{width + 0.3:.1f}" height="{_CELL_HEIGHT + 0.3}"'
            )
            fill = _colour(value, least, most)
            parts.append(f'<rect {at_place} fill="{fill}"><title>{escape(hint)}</title></rect>')
    ends = f"{rows.name} down; {columns.name} {column_labels[0]} to {column_labels[-1]} across" if column_labels else ""
    parts.append(_text(_MARGIN, _LINE + height + _LINE - 2, ends))
    whole = height + 2 * _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {whole}" width="{_WIDTH}" height="{whole}" '
        f'style="max-width:100%;display:block;margin:.4em 0" font-family="sans-serif" font-size="11" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _fewer(values: np.ndarray, labels: Sequence[str], most: int) -> tuple[np.ndarray, list[str]]:
    """At most so many rows, and their labels: 0-3, 4-7 where each is of four."""
    each = max(1, math.ceil(len(values) / most))
    if each == 1:
        return values, list(labels)
    starts = range(0, len(values), each)
    groups = [labels[start : start + each] for start in starts]
    found = np.stack([root_mean_square(values[start : start + each], 0) for start in starts])
    return found, [group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups]


def _colour(value: float, least: float, most: float) -> str:
    if not math.isfinite(value):
        return "none"
    span = math.log(most / least) if most > least > 0 else 0.0
    share = math.log(value / least) / span if span and value > 0 else 0.0
    places = np.linspace(0, 1, len(_VIRIDIS))
    red, green, blue = (round(float(np.interp(share, places, channel))) for channel in _VIRIDIS.T)
    return f"#{red:02x}{green:02x}{blue:02x}"
