"""How notebooks show results: tokens tinted by likelihood, heat maps, tables of pandas and arrays of xarray."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import xarray


T = TypeVar("T")

MOST_SHOWN = 20
"""Outputs of a list that a notebook shows; the others are counted."""


def optional(module: str, method: str) -> Any:
    """A package that jaxllm works without. Raises ConfigError: it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"{method} needs {module}, which is not installed: pip install {module}") from None


def token_rows(
    token_ids: Sequence[int], steps: Sequence[Mapping[int, Likely] | None] | None, **same: Any
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for position, token_id in enumerate(token_ids):
        step = None if steps is None else steps[position]
        candidates: Iterable[tuple[int, Likely | None]] = step.items() if step else [(token_id, None)]
        for candidate, entry in candidates:
            token, logprob, rank = (entry.decoded_token, entry.logprob, entry.rank) if entry else (None, math.nan, None)
            row = {"position": position, "token_id": candidate, "token": token, "logprob": logprob, "rank": rank}
            rows.append({**same, **row, "chosen": candidate == token_id})
    return rows


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """A DataFrame of rows. Raises ConfigError: pandas is not installed."""
    found = optional("pandas", "to_pandas").DataFrame(list(rows))
    return found.astype({"rank": "Int64"}) if "rank" in found else found


def dataset(positions: np.ndarray, values: Mapping[tuple[str, int], np.ndarray], final: str) -> xarray.Dataset:
    """Activations by names and layers, on common axes where they fit. Raises ConfigError: xarray is not installed."""
    xr = optional("xarray", "to_xarray")
    coordinates = {"position": positions}
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    for name in dict.fromkeys(name for name, _ in values):
        layers = [layer for point, layer in values if point == name]
        stacked = np.stack([values[name, layer] for layer in layers])
        channel = _axis("channel", np.arange(stacked.shape[-1]), coordinates, name)
        if name == final:
            variables[name] = (("position", channel), stacked[0])
        else:
            variables[name] = ((_axis("layer", np.array(layers), coordinates, name), "position", channel), stacked)
    return xr.Dataset(variables, coords=coordinates)


def _axis(axis: str, labels: np.ndarray, coordinates: dict[str, np.ndarray], name: str) -> str:
    if not np.array_equal(coordinates.setdefault(axis, labels), labels):
        axis = f"{name}_{axis}"
        coordinates[axis] = labels
    return axis


class OutputList(list[T], Generic[T]):
    """A list of outputs for notebooks."""

    def _repr_html_(self) -> str:
        shown = [
            output._repr_html_() if hasattr(output, "_repr_html_") else f"<pre>{escape(repr(output))}</pre>"
            for output in self[:MOST_SHOWN]
        ]
        left = len(self) - len(shown)
        return "<hr>".join([*shown, *([f"<em>and {left:,} more</em>"] if left else [])]) or "<em>no outputs</em>"


class TableList(OutputList[T]):
    """Outputs that are tables too, such as completions and scores."""

    def to_pandas(self) -> pandas.DataFrame:
        """All tables, by their place `output` in the list. Raises ConfigError: pandas is not installed."""
        pd = optional("pandas", "to_pandas")
        tables = [output.to_pandas() for output in self]  # type: ignore[attr-defined]
        for index, table in enumerate(tables):
            table.insert(0, "output", index)
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


MOST_TOKENS = 2000
"""Of a text; what follows is counted only."""
_ORANGE = "230,120,0"
_STRONGEST = 0.6
"""How opaque the tint of an impossible token is: text remains readable on it, on light pages and on dark ones."""


class Likely(Protocol):
    """What is read of a `Logprob`."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def decoded_token(self) -> str | None: ...
    @property
    def token_bytes(self) -> bytes | None: ...


class ShownToken(NamedTuple):
    text: str
    probability: float | None
    hint: str


def shown_tokens(
    token_ids: Sequence[int], steps: Sequence[Mapping[int, Likely] | None], whole: str | None = None
) -> list[ShownToken]:
    """The tokens of a text with log-probabilities; a character of several tokens is shown at its last one.

    Tokens without a text are shown by their ids, but for the first one of a known `whole`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = []
    for token_id, step in zip(token_ids, steps, strict=True):
        entry = None if step is None else step.get(token_id)
        if entry is None or entry.token_bytes is None:
            text = f"⟨{token_id}⟩"
        else:
            text = decoder.decode(entry.token_bytes) or "·"
        probability = None if entry is None else math.exp(entry.logprob)
        found.append(ShownToken(text, probability, _hint(token_id, step)))
    rest = "".join(token.text for token in found[1:])
    if found and found[0].probability is None and whole is not None and whole.endswith(rest) and whole != rest:
        found[0] = found[0]._replace(text=whole.removesuffix(rest))
    return found


def _hint(token_id: int, step: Mapping[int, Likely] | None) -> str:
    if step is None or token_id not in step:
        return f"token {token_id}"
    own = step[token_id]
    ranked = "" if own.rank is None else f", rank {own.rank}"
    exact = f"log-probability {own.logprob:.3f}{ranked}, token {token_id}"
    others = [_chance(other, entry) for other, entry in step.items() if other != token_id]
    return "\n".join([f"{_chance(token_id, own)} ({exact})", *others])


def _chance(token_id: int, entry: Likely) -> str:
    name = str(token_id) if entry.decoded_token is None else repr(entry.decoded_token)
    return f"{name}: {100 * math.exp(entry.logprob):.3g} %"


def tinted(tokens: Iterable[ShownToken]) -> str:
    """Spans whose background is the stronger the less likely the token was, each with its hint as a tooltip."""
    spans = []
    for token in tokens:
        style = ""
        if token.probability is not None:
            opacity = _STRONGEST * (1 - min(max(token.probability, 0.0), 1.0))
            style = f' style="background-color:rgba({_ORANGE},{opacity:.3f})"'
        spans.append(f'<span title="{escape(token.hint)}"{style}>{escape(token.text)}</span>')
    return "".join(spans)


def text_block(html: str, *, faint: bool = False) -> str:
    style = ' style="opacity:.65"' if faint else ""
    return f"<span{style}>{html}</span>"


def panel(texts: Sequence[str], note: str) -> str:
    style = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"
    shown = "".join(f'<div style="{style}">{text}</div>' for text in texts)
    return f'<div style="margin:.4em 0">{shown}<div style="font-size:85%;opacity:.7">{escape(note)}</div></div>'


def shortened(text: str, most: int = 60) -> str:
    """A text as `repr` writes it, of which the middle may be left out."""
    half = most // 2
    return repr(text) if len(text) <= most else f"{text[:half]!r} … {text[-half:]!r}"


MOST_ROWS, MOST_COLUMNS = 64, 128
"""Cells of a map; where there are more values, a cell is of several."""
_WIDTH, _CELL_HEIGHT, _MARGIN, _LINE = 720, 10, 44, 14
_VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)


class Axis(NamedTuple):
    """What the rows or the columns of a map are, and the label of each."""

    name: str
    labels: Sequence[str]


def root_mean_square(values: np.ndarray, axis: int) -> np.ndarray:
    return np.sqrt(np.mean(np.square(values.astype(np.float64)), axis=axis))


def heat_map(title: str, values: np.ndarray, rows: Axis, columns: Axis) -> str:
    """SVG of `[rows, columns]` numbers from 0, on a logarithmic scale; a cell of several has their root mean square."""
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
            hint = escape(f"{rows.name} {label}, {columns.name} {column}: {value:.4g}")
            x, fill = _MARGIN + place * width, _colour(value, least, most)
            size = f'width="{width + 0.3:.1f}" height="{_CELL_HEIGHT + 0.3}"'
            parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{fill}"><title>{hint}</title></rect>')
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
    """At most `most` rows, and their labels: 0-3, 4-7 where each is of four."""
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
