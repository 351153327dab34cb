"""What one adapter does to one product of the model, as rows of that product's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from jaxllm.engine.adapters.base_weights import BaseWeights
from jaxllm.errors import CheckpointError
from jaxllm.sharding.mesh import Segment
from jaxllm.weights.adapters import Adapter, LowRank
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.names import NameMap, Source, Sources, transposed

Change = TypeVar("Change", LowRank, np.ndarray)
MERGE = "which is supported only where the adapter is merged: see `jaxllm convert --merge-lora`"


@dataclass(frozen=True)
class ProductRows:
    """An adapter's part in one product.

    Attributes:
        weight, bias: the product's parameters; the bias may be missing.
        names: where a checkpoint of the adapter's format has the model's parameters.
        base: the model's own weights. Magnitudes are lengths of rows with the adapter in them, and biases are stored
            whole: in both cases what is added depends on what the model has.
        rank: of the tables.
    """

    adapter: Adapter
    weight: ParamSpec
    bias: ParamSpec | None
    names: NameMap
    base: BaseWeights
    rank: int

    def rows(self) -> tuple[dict[str, np.ndarray], set[str]]:
        """Rows of the tables `a`, `b`, `gain`, `ranks` and `bias`, where there is something in them, and the tensors'
        names.
        """
        rows: dict[str, np.ndarray] = {}
        updates = self._changes(self.adapter.updates, self.weight)
        if updates:
            outputs = self._outputs(updates)
            rows["a"] = self._inputs(updates)
            rows["ranks"] = np.array(
                [0 if update is None else len(update.a) for _, update in self._by_segment(updates)]
            )
            rows["b"] = _laid_out(self.weight, [b for b, _ in outputs]).T
            rows["gain"] = _laid_out(self.weight, [gain for _, gain in outputs])
        biases = self._changes(self.adapter.replaced, self.bias) if self.bias is not None else []
        if self.bias is not None and biases:
            rows["bias"] = _laid_out(self.bias, self._biases(self.bias, biases))
        return rows, {source.name for source, change in [*updates, *biases] if change is not None}

    def _changes(self, changes: Mapping[str, Change], parameter: ParamSpec) -> list[tuple[Source, Change | None]]:
        """What becomes of each tensor that a parameter is made of; nothing where nothing becomes of any."""
        options: tuple[Sources, ...] = self.names.get(parameter.path, ())
        for option in options:
            found = [(source, changes.get(source.name)) for source in option]
            if any(change is not None for _, change in found):
                return found
        return []

    @cached_property
    def _own(self) -> Float[np.ndarray, "o i"]:
        return self.base.rows(self.weight)

    def _inputs(self, updates: Sequence[tuple[Source, LowRank | None]]) -> Float[np.ndarray, "k i"]:
        """`a` of each segment; what is added to a tensor that holds several of them is that of each."""
        count, inputs = len(_segments(self.weight)), self.weight.shape[-1]
        rows = np.zeros((count * self.rank, inputs), np.float32)
        for index, (source, update) in enumerate(self._by_segment(updates)):
            if update is None:
                continue
            if update.a.shape[1] != inputs:
                raise CheckpointError(
                    f"{self.adapter.path}: its A of {source.name!r} has {update.a.shape[1]} inputs; "
                    f"the model's has {inputs}"
                )
            rows[index * self.rank : index * self.rank + len(update.a)] = update.a
        return rows

    def _by_segment(self, updates: Sequence[tuple[Source, LowRank | None]]) -> Sequence[tuple[Source, LowRank | None]]:
        """What is added to each segment: that of the tensor which holds it."""
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
                    raise CheckpointError(
                        f"{self.adapter.path}: its B of {source.name!r} has {b.shape[0]} outputs; "
                        f"the model's has {rows}"
                    )
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
        """Rows that belong to a matrix's outputs, in the model's order, float32."""
        flipped = source.transform is transposed
        if source.also or source.stack or flipped != update.transposed or not (flipped or source.moves_rows):
            raise CheckpointError(f"{self.adapter.path}: it adds to {source.name!r}, {MERGE}")
        rows = np.asarray(rows, np.float32)
        return rows if flipped or source.transform is None else source.transform(rows)

    def _biases(self, bias: ParamSpec, changes: Sequence[tuple[Source, np.ndarray | None]]) -> list[np.ndarray]:
        """By how much each tensor of the bias differs from the model's own."""
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
                raise CheckpointError(
                    f"{self.adapter.path}: its {source.name!r} is {values.shape}; the model's is {own[at].shape}"
                )
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
