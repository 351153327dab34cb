"""Which of a checkpoint's tensors an adapter means, whose names and layouts may be those of another format."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.family import hf_renaming
from jaxllm.models.registry import ModelSpec, adapter_names
from jaxllm.weights.adapters import LowRank
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.names import NameMap, Source, plus_one, transposed

Paths = defaultdict[str, list[tuple[str, tuple[Source, ...], int]]]
"""Tensor name -> the parameters that it may be a part of, each with all its parts, and which of these it is."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the checkpoint that an adapter changes.

    Attributes:
        there, here: how the adapter's format and the checkpoint's keep it; each has a way from there into the engine.
    """

    name: str
    there: Source
    here: Source

    def replacing(self, tensor: np.ndarray) -> np.ndarray:
        """The adapter's own tensor as the checkpoint would have it, float32."""
        values = tensor.astype(np.float32)
        return _undone(self.here, values if self.there.transform is None else self.there.transform(values))

    def adding(self, update: LowRank) -> LowRank:
        """An adapter's update for the tensor as the checkpoint has it."""
        magnitude = None if update.magnitude is None else self._rows(update.magnitude)
        flips = (self.there.transform is transposed) != (self.here.transform is transposed)
        return replace(update, b=self._rows(update.b), magnitude=magnitude, transposed=update.transposed != flips)

    def _rows(self, values: np.ndarray) -> np.ndarray:
        """Rows in the order in which the checkpoint has them."""
        if self.there.by_rows and self.there.transform is not None:
            values = self.there.transform(values)
        return _undone(self.here, values) if self.here.by_rows else values


class AdapterNames:
    """Finds the places of one format's tensors in a checkpoint."""

    def __init__(self, adapter_format: str, checkpoint: Checkpoint, spec: ModelSpec):
        self._checkpoint, self._spec = checkpoint, spec
        self._of_same_format = (adapter_format == "gguf") == (checkpoint.format == "gguf")
        self._rename = hf_renaming(checkpoint.tensors) if checkpoint.format == "safetensors" else str
        self._paths = _paths(adapter_names(spec)[adapter_format])

    def place(self, name: str) -> TensorPlace | None:
        """The tensor that an adapter calls `name`; None where the model has none such.

        Raises CheckpointError where the checkpoint keeps it together with others, or rearranges more than rows.
        """
        if self._of_same_format and (own := self._rename(name)) in self._checkpoint.tensors:
            return TensorPlace(own, Source(own), Source(own))
        here: tuple[Source, ...] = ()
        for path, sources, index in self._paths[name]:
            here = found_sources(self._checkpoint, self._spec, path)
            if len(here) == len(sources) and _is_simple(here[index]) and _is_simple(sources[index]):
                return TensorPlace(here[index].name, sources[index], here[index])
        if here and here[0].name in self._checkpoint.tensors:
            raise CheckpointError(
                f"{self._checkpoint.path}: keeps {shown(name)} in another layout, together with others; merge the "
                "adapter into the model that it was trained on, and convert the result"
            )
        return None


def found_sources(checkpoint: Checkpoint, spec: ModelSpec, path: str) -> tuple[Source, ...]:
    """The tensors of a parameter that the checkpoint has; if it has none, those that it would have first of all."""
    options = spec.names.get(path, ((),))
    return next((sources for sources in options if all(s.name in checkpoint.tensors for s in sources)), options[0])


def _paths(names: NameMap) -> Paths:
    paths: Paths = defaultdict(list)
    for path, options in names.items():
        for sources in options:
            for index, source in enumerate(sources):
                if not source.stack:
                    paths[source.name].append((path, sources, index))
    return paths


def _is_simple(source: Source) -> bool:
    """Whether its way into the engine can be taken back."""
    return not source.stack and not source.also and (source.moves_rows or source.transform in (transposed, plus_one))


def _undone(source: Source, values: np.ndarray) -> np.ndarray:
    """What the source's transform makes `values` of."""
    if source.transform is None:
        return values
    if source.by_rows:
        rows = np.empty_like(values)
        rows[source.transform(np.arange(len(values)))] = values
        return rows
    return values - 1 if source.transform is plus_one else transposed(values)
