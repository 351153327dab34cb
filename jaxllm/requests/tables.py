"""Results as tables of pandas and arrays of xarray, which are imported when somebody wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import xarray

    from jaxllm.requests.shown_tokens import Likely

T = TypeVar("T")

MOST_SHOWN = 20
"""Outputs of a list that a notebook shows; the others are counted."""


def optional(module: str, method: str) -> Any:
    """A package that jaxllm works without.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"{method} needs {module}, which is not installed: pip install {module}") from None


def token_rows(
    token_ids: Sequence[int], steps: Sequence[Mapping[int, Likely] | None] | None, **same: Any
) -> list[dict[str, Any]]:
    """A row for each token, and for each alternative to it that was asked for."""
    rows: list[dict[str, Any]] = []
    for position, token_id in enumerate(token_ids):
        step = None if steps is None else steps[position]
        candidates: Iterable[tuple[int, Likely | None]] = step.items() if step else [(token_id, None)]
        for candidate, entry in candidates:
            rows.append(
                same
                | {
                    "position": position,
                    "token_id": candidate,
                    "token": None if entry is None else entry.decoded_token,
                    "logprob": float("nan") if entry is None else entry.logprob,
                    "rank": None if entry is None else entry.rank,
                    "chosen": candidate == token_id,
                }
            )
    return rows


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """A DataFrame of rows; ranks are whole numbers, of which some may be missing.

    Raises:
        ConfigError: pandas is not installed.
    """
    found = optional("pandas", "to_pandas").DataFrame(list(rows))
    return found.astype({"rank": "Int64"}) if "rank" in found else found


def dataset(positions: np.ndarray, values: Mapping[tuple[str, int], np.ndarray], final: str) -> xarray.Dataset:
    """Activations by their names and layers; a name whose layers or channels are others than the first's has axes of
    its own.

    Raises:
        ConfigError: xarray is not installed.
    """
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
    """The axis with these labels: the common one, or the name's own."""
    if not np.array_equal(coordinates.setdefault(axis, labels), labels):
        axis = f"{name}_{axis}"
        coordinates[axis] = labels
    return axis


class OutputList(list[T], Generic[T]):
    """A list of outputs that a notebook shows one under the other."""

    def _repr_html_(self) -> str:
        shown = [_html_of(output) or f"<pre>{escape(repr(output))}</pre>" for output in self[:MOST_SHOWN]]
        left = len(self) - len(shown)
        return "<hr>".join([*shown, *([f"<em>and {left:,} more</em>"] if left else [])]) or "<em>no outputs</em>"


class TableList(OutputList[T]):
    """Outputs that are tables too, such as completions and scores."""

    def to_pandas(self) -> pandas.DataFrame:
        """The tables of all of them, one after the other; `output` is the place in the list.

        Raises:
            ConfigError: pandas is not installed.
        """
        pd = optional("pandas", "to_pandas")
        tables = [output.to_pandas() for output in self]  # type: ignore[attr-defined]
        for index, table in enumerate(tables):
            table.insert(0, "output", index)
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _html_of(output: object) -> str | None:
    show: Callable[[], str] | None = getattr(output, "_repr_html_", None)
    return None if show is None else show()
