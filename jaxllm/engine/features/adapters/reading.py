"""From an adapter's file to its rows in the model's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from jaxllm.errors import CheckpointError
from jaxllm.models.options import AdapterSizes
from jaxllm.sharding.mesh import Segment
from jaxllm.weights.adapters import Adapter, LowRank, open_adapter
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec, read_rows
from jaxllm.weights.names import NameMap, Source, Sources, transposed

Change = TypeVar("Change", LowRank, np.ndarray)
MERGE = "which is supported only where the adapter is merged: see `jaxllm convert --merge-lora`"


@dataclass(frozen=True)
class ProductRows:
    """An adapter's part in one product, which has a weight and perhaps a bias."""

    adapter: Adapter
    weight: ParamSpec
    bias: ParamSpec | None
    names: NameMap
    base: BaseWeights
    """Read for magnitudes (lengths of rows with the adapter) and biases, which are stored whole."""
    rank: int

    def rows(self) -> tuple[dict[str, np.ndarray], set[str]]:
        """Rows of the tables `a`, `b`, `gain`, `ranks` and `bias` that have some, and the tensors' names."""
        rows: dict[str, np.ndarray] = {}
        updates = self._changes(self.adapter.updates, self.weight)
        if updates:
            outputs = self._outputs(updates)
            rows["a"] = self._inputs(updates)
            ranks = [0 if update is None else len(update.a) for _, update in self._by_segment(updates)]
            rows["ranks"] = np.array(ranks)
            rows["b"] = _laid_out(self.weight, [b for b, _ in outputs]).T
            rows["gain"] = _laid_out(self.weight, [gain for _, gain in outputs])
        biases = self._changes(self.adapter.replaced, self.bias) if self.bias is not None else []
        if self.bias is not None and biases:
            rows["bias"] = _laid_out(self.bias, self._biases(self.bias, biases))
        return rows, {source.name for source, change in [*updates, *biases] if change is not None}

    def _changes(self, changes: Mapping[str, Change], parameter: ParamSpec) -> list[tuple[Source, Change | None]]:
        options: tuple[Sources, ...] = self.names.get(parameter.path, ())
        found = ([(source, changes.get(source.name)) for source in option] for option in options)
        return next((option for option in found if any(change is not None for _, change in option)), [])

    @cached_property
    def _own(self) -> Float[np.ndarray, "o i"]:
        return self.base.rows(self.weight)

    def _inputs(self, updates: Sequence[tuple[Source, LowRank | None]]) -> Float[np.ndarray, "k i"]:
        """`a` of each segment; a tensor that holds several segments has the same for each."""
        count, inputs = len(_segments(self.weight)), self.weight.shape[-1]
        rows = np.zeros((count * self.rank, inputs), np.float32)
        for index, (source, update) in enumerate(self._by_segment(updates)):
            if update is None:
                continue
            if update.a.shape[1] != inputs:
                has = f"has {update.a.shape[1]} inputs; the model's has {inputs}"
                raise CheckpointError(f"{self.adapter.path}: its A of {source.name!r} {has}")
            rows[index * self.rank : index * self.rank + len(update.a)] = update.a
        return rows

    def _by_segment(self, updates: Sequence[tuple[Source, LowRank | None]]) -> Sequence[tuple[Source, LowRank | None]]:
        count = len(_segments(self.weight))
        return updates if len(updates) == count else list(updates) * count

    def _outputs(self, updates: Sequence[tuple[Source, LowRank | None]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`scale * b`, padded to the tables' rank, and the gain of each tensor, its rows in the model's order."""
        found = []
        for at, (source, update) in zip(_parts(self.weight, len(updates)), updates, strict=True):
            rows = at.stop - at.start
            padded, gain = np.zeros((rows, self.rank), np.float32), np.zeros(rows, np.float32)
            if update is not None:
                b = self._moved(source, update, update.b) * np.float32(update.scale)
                if b.shape[0] != rows:
                    has = f"has {b.shape[0]} outputs; the model's has {rows}"
                    raise CheckpointError(f"{self.adapter.path}: its B of {source.name!r} {has}")
                if update.magnitude is not None:
                    # DoRA (Liu et al. 2024, arXiv:2402.09353): rows of w + b @ a get the magnitude as their length.
                    whole = self._own[at] + b @ np.asarray(update.a, np.float32)
                    lengths = self._moved(source, update, update.magnitude)
                    factor = (lengths / np.linalg.norm(whole, axis=1)).astype(np.float32)
                    b, gain = b * factor[:, None], factor - 1
                padded[:, : b.shape[1]] = b
            found.append((padded, gain))
        return found

    def _moved(self, source: Source, update: LowRank, rows: np.ndarray) -> np.ndarray:
        flipped = source.transform is transposed
        if source.also or source.stack or flipped != update.transposed or not (flipped or source.moves_rows):
            raise CheckpointError(f"{self.adapter.path}: it adds to {source.name!r}, {MERGE}")
        rows = np.asarray(rows, np.float32)
        return rows if flipped or source.transform is None else source.transform(rows)

    def _biases(self, bias: ParamSpec, changes: Sequence[tuple[Source, np.ndarray | None]]) -> list[np.ndarray]:
        own = self.base.rows(bias)
        found = []
        for at, (source, changed) in zip(_parts(bias, len(changes)), changes, strict=True):
            if changed is None:
                found.append(np.zeros(at.stop - at.start, np.float32))
                continue
            if source.also or source.stack:
                raise CheckpointError(f"{self.adapter.path}: it replaces {source.name!r}, {MERGE}")
            values = np.asarray(changed, np.float32)
            values = values if source.transform is None else source.transform(values)
            if values.shape != own[at].shape:
                shapes = f"{values.shape}; the model's is {own[at].shape}"
                raise CheckpointError(f"{self.adapter.path}: its {source.name!r} is {shapes}")
            found.append(values - own[at])
        return found


def _segments(parameter: ParamSpec) -> Sequence[Segment]:
    return parameter.layout.segments if parameter.layout is not None else (Segment(parameter.shape[0], 1),)


def _parts(parameter: ParamSpec, count: int) -> list[slice]:
    """The rows of each of `count` tensors that a parameter is made of: a segment each, or one that holds them all."""
    segments = [segment.rows for segment in _segments(parameter)]
    sizes = segments if count == len(segments) else [sum(segments)]
    ends = np.cumsum(sizes)
    return [slice(int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True)]


def _laid_out(parameter: ParamSpec, parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if parameter.layout is None else parameter.layout.assemble(parts)


class BaseWeights(ExitStack):
    """Reads parameters from the model's checkpoint, which is opened by the first of them."""

    def __init__(self, open_checkpoint: Callable[[], Checkpoint], names: NameMap):
        super().__init__()
        self._open, self._names = open_checkpoint, names

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return self.enter_context(closing(self._open()))

    def rows(self, parameter: ParamSpec) -> Float[np.ndarray, "o *i"]:
        """A whole parameter in the order of its tensors, before it is laid out for several devices."""
        return read_rows(self._checkpoint, parameter, self._names)


AdapterRows = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class AdapterReader:
    tables: tuple[ParamSpec, ...]
    """Those of each product that adapters may add to, and of the adapters' own numbers."""
    weights: dict[str, ParamSpec]
    names: dict[str, NameMap]
    """Of the parameters in checkpoints of each format: "peft" is named as Hugging Face's checkpoints."""
    sizes: AdapterSizes
    base: Callable[[], BaseWeights]

    def read(self, path: str) -> AdapterRows:
        """An adapter's rows in host memory. Raises CheckpointError: unreadable, too high a rank, or no change to a
        product.
        """
        adapter = open_adapter(Path(path))
        if adapter.rank > self.sizes.rank:
            raise CheckpointError(
                f"{adapter.path}: its rank is {adapter.rank}; accepted are ranks up to max_lora_rank, "
                f"which is {self.sizes.rank}"
            )
        gains = any(update.magnitude is not None for update in adapter.updates.values())
        found = {"adapter_gains": np.array(int(gains))}
        names, used = self.names[adapter.format], set[str]()
        with self.base() as base:
            for product in self._products:
                weight, bias = self.weights[f"{product}.weight"], self.weights.get(f"{product}.bias")
                rows, changed = ProductRows(adapter, weight, bias, names, base, self.sizes.rank).rows()
                found |= {f"{product}.low_rank.{name}": row for name, row in rows.items()}
                used |= changed
        _check_all_used(adapter, used, names)
        return tuple(
            found[table.path].astype(table.dtype) if table.path in found else np.zeros(table.shape[1:], table.dtype)
            for table in self.tables
        )

    @property
    def _products(self) -> list[str]:
        paths = (table.path.rpartition(".low_rank.")[0] for table in self.tables)
        return list(dict.fromkeys(path for path in paths if path))


def _check_all_used(adapter: Adapter, used: set[str], names: NameMap) -> None:
    changed = [("adds to", name) for name in adapter.updates] + [("replaces", name) for name in adapter.replaced]
    unused = next((change for change in changed if change[1] not in used), None)
    if unused is None:
        return
    verb, name = unused
    known = {source.name for options in names.values() for option in options for source in option}
    why = MERGE if name in known else "which this model has no tensor of that adapters could change"
    raise CheckpointError(f"{adapter.path}: it {verb} {name!r}, {why}")
