"""Adapters merged into the model that is converted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.cli.convert.adapter_names import AdapterNames, TensorPlace, found_sources
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.folders import existing, in_home
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.weights.adapters import Adapter, open_adapter
from jaxllm.weights.checkpoint import Checkpoint, Edit, MergedCheckpoint
from jaxllm.weights.fields import shown


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter to merge, and how strongly: 1 is as it was trained."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> MergedAdapter:
        """`PATH` or `PATH=SCALE`. Raises ConfigError where the scale is no finite number."""
        path, equals, scale = text.rpartition("=")
        if not equals or existing(text) is not None:
            return cls(in_home(text))
        try:
            number = float(scale)
        except ValueError:
            number = np.nan
        if not path or not np.isfinite(number):
            raise ConfigError(f"merge_lora is {text!r}; accepted is PATH or PATH=SCALE, the scale a finite number")
        return cls(in_home(path), number)


def with_adapters(checkpoint: Checkpoint, adapters: Sequence[MergedAdapter]) -> Checkpoint:
    """`checkpoint` with adapters merged into its weights one after the other; as it is where there are none.

    A model whose head is its embedding gets a head of its own where an adapter changes one of the two.

    Raises:
        ConfigError: the checkpoint was made by `jaxllm convert --to orbax`.
        CheckpointError: as `open_adapter`, or an adapter has a tensor that the model lacks, or has in another shape.
    """
    if not adapters:
        return checkpoint
    if checkpoint.format not in ("safetensors", "gguf"):
        raise ConfigError(
            f"merge_lora takes a model as it was published; {checkpoint.path} was converted already: merge into what "
            "it was made of"
        )
    spec = model_spec(checkpoint)
    merging = _Merging(checkpoint, spec)
    for one in adapters:
        merging.add(open_adapter(one.path), one.scale)
    return merging.finished()


class _Merging:
    """What becomes of each of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec):
        self._checkpoint, self._spec = checkpoint, spec
        self._edits: defaultdict[str, list[Edit]] = defaultdict(list)
        self._embedding = found_sources(checkpoint, spec, "embed.weight")[0].name
        self._head = found_sources(checkpoint, spec, "head.weight")[0].name if spec.config.tie_word_embeddings else None
        """The name of a head that the checkpoint does not have, since it is the embedding."""

    def add(self, adapter: Adapter, scale: float) -> None:
        """What one adapter replaces, and then what it adds."""
        names = AdapterNames(adapter.format, self._checkpoint, self._spec)
        for name, tensor in adapter.replaced.items():
            place = self._find(adapter, names, name)
            values = place.replacing(tensor)
            self._check(adapter, name, place, values.shape)
            self._edits[place.name].append(partial(_replaced, values))
        for name, update in adapter.updates.items():
            place = self._find(adapter, names, name)
            moved = place.adding(update)
            self._check(adapter, name, place, moved.shape)
            self._edits[place.name].append(partial(moved.added_to, strength=scale))

    def finished(self) -> MergedCheckpoint:
        """The checkpoint with everything in it; a head that was the embedding is one of its own if they differ now."""
        config, copies = self._checkpoint.config, {}
        if self._head is not None and self._edits.keys() & {self._head, self._embedding}:
            copies[self._head] = self._embedding
            config = _untied(config) if self._checkpoint.format == "safetensors" else config
        return MergedCheckpoint(self._checkpoint, self._edits, copies, config)

    def _find(self, adapter: Adapter, names: AdapterNames, name: str) -> TensorPlace:
        place = names.place(name)
        if place is None or (place.name not in self._checkpoint.tensors and place.name != self._head):
            trained = f"; it was trained on {shown(adapter.base_model)}" if adapter.base_model else ""
            raise CheckpointError(
                f"{adapter.path}: changes {shown(name)}, which {self._checkpoint.path} does not have{trained}"
            )
        return place

    def _check(self, adapter: Adapter, name: str, place: TensorPlace, shape: tuple[int, ...]) -> None:
        stored = self._embedding if place.name == self._head else place.name
        expected = self._checkpoint.tensors[stored].shape
        if shape != expected:
            raise CheckpointError(
                f"{adapter.path}: {shown(name)} is of shape {shape}; expected is {expected}, as "
                f"{self._checkpoint.path} has it"
            )


def _replaced(values: np.ndarray, _: np.ndarray) -> np.ndarray:
    return values


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model whose head is not its embedding."""
    inner = config.get("text_config")
    changed = {"text_config": _untied(inner)} if isinstance(inner, dict) and "tie_word_embeddings" in inner else {}
    return config | changed | {"tie_word_embeddings": False}
