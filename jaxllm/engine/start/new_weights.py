"""Other weights for an engine that runs: read and packed while it goes on, and exchanged between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.cpu_kernels.tiles import use_huge_pages
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.messages import NewWeights, WeightSource
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.registry import ModelSpec, model_spec, with_importance
from jaxllm.quantization.weight import DenseKind
from jaxllm.sharding.mesh import Layout
from jaxllm.weights.checkpoint import ArrayCheckpoint, Checkpoint
from jaxllm.weights.loader import ParamSpec, read_parameters, whole_parameters
from jaxllm.weights.names import NameMap
from jaxllm.weights.source import resolve_model
from jaxllm.wording import did_you_mean

TIED_HEAD = "lm_head.weight"
"""The end of the name of a head that may be the embedding table."""


class WeightReader:
    """Reads weights for a model that runs, and exchanges them on its devices."""

    def __init__(self, config: EngineConfig, blueprint: Blueprint, functions: StepFunctions, mesh: Mesh):
        self._config = config
        self._spec = blueprint.spec
        self._params = blueprint.params
        self._on_cpu = blueprint.plan.platform == "cpu"
        self._functions = functions
        self._mesh = mesh
        self._first: dict[str, int] = {}
        """The place of each parameter's first array."""
        place = 0
        for param in self._params:
            self._first[param.path] = place
            place += len(param.leaves())

    @under_own_settings
    def read(self, source: WeightSource) -> NewWeights:
        """The weights of `source`, quantized and laid out as the engine keeps them. The engine runs on meanwhile.

        A model must have all of them, arrays may be some.

        Raises:
            ConfigError: this engine cannot exchange its weights.
            ModelNotFoundError, CheckpointError: `source` is not there, or is of another model; nothing has changed.
        """
        if self._config.enable_lora:
            raise ConfigError("enable_lora is True: adapters were made for the engine's own weights; start it without")
        if self._config.pipeline_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size is {self._config.pipeline_parallel_size}: only an engine whose layers are in "
                "one stage can exchange its weights; it must be 1"
            )
        if self._mesh.is_multi_process:
            raise ConfigError("num_processes is more than 1: only an engine in one process can exchange its weights")
        if isinstance(source, Mapping):
            return self._read_arrays(source)
        return self._read_model(str(source))

    def exchange(self, weights: list[jax.Array], new: NewWeights) -> tuple[jax.Array, ...]:
        """The devices' arrays with the new ones in their places; see `WeightPacking.replace`."""
        changed = self._functions.replace_weights(weights, new)
        if self._on_cpu:
            use_huge_pages(changed)
        return changed

    def _read_model(self, name: str) -> NewWeights:
        path = resolve_model(name, download_dir=self._config.download_dir)
        checkpoint = open_model(self._config, path)
        try:
            spec = model_spec(checkpoint)
            if difference := _difference(self._spec, spec):
                raise CheckpointError(f"{path} is another model than the one that runs: {difference}")
            weighed = with_importance(checkpoint, spec, self._config.imatrix)
            return self._pack(weighed, list(self._params), spec.names, spec.ignored)
        finally:
            checkpoint.close()

    def _read_arrays(self, arrays: Mapping[str, Any]) -> NewWeights:
        by_path = {param.path: param for param in self._params}
        if not arrays.keys() & by_path.keys():
            names = self._spec.names
            checkpoint = ArrayCheckpoint(self._without_tied_head(ArrayCheckpoint(arrays).arrays))
            return self._pack(checkpoint, whole_parameters(checkpoint, self._params, names), names)
        if odd := sorted(arrays.keys() - by_path.keys()):
            hint = did_you_mean(odd[0], by_path)
            raise CheckpointError(f"{odd[0]!r} is no name of llm.params, as others of the given arrays are{hint}")
        new: NewWeights = {}
        stored = {}
        for path, array in ArrayCheckpoint(arrays).arrays.items():
            param = by_path[path]
            if array.shape != param.shape:
                raise CheckpointError(
                    f"{path!r} is {list(array.shape)}; it must be {list(param.shape)}, as in llm.params"
                )
            if _is_plain(param):
                new[self._first[path]] = np.array(array).astype(param.leaves()[0].array.dtype, copy=False)
            elif param.layout is not None and param.layout.tp > 1:
                raise CheckpointError(
                    f"{path!r} is kept quantized on several devices; give it by the names of the checkpoint"
                )
            else:
                stored[path] = array if param.layout is None else _without_padding(array, param.layout)
        return new | self._pack(ArrayCheckpoint(stored), [by_path[path] for path in stored], {})

    def _without_tied_head(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Without a head that is the embedding table as well: libraries list it under both names."""
        heads = [name for name in arrays if name.endswith(TIED_HEAD)]
        if not self._spec.config.tie_word_embeddings or not heads:
            return arrays
        tables = [source.name for sources in self._spec.names["embed.weight"] for source in sources]
        given = [arrays[name] for name in tables if name in arrays]
        for head in heads:
            if not given or not np.array_equal(np.asarray(arrays[head]), np.asarray(given[0])):
                raise CheckpointError(
                    f"{head!r} is not the same as {tables[0]!r}, and the model that runs has one matrix for both"
                )
        return {name: array for name, array in arrays.items() if name not in heads}

    def _pack(
        self, checkpoint: Checkpoint, given: list[ParamSpec], names: NameMap, ignored: Sequence[str] = ()
    ) -> NewWeights:
        new: NewWeights = {}
        for param, value in zip(given, read_parameters(checkpoint, given, names, ignored), strict=True):
            for offset, (given_array, leaf) in enumerate(zip(jax.tree.leaves(value), param.leaves(), strict=True)):
                array, kept = np.asarray(given_array), leaf.array
                if (array.shape, array.dtype) != (kept.shape, kept.dtype):
                    raise CheckpointError(
                        f"{param.path}: the engine keeps {kept.dtype}{list(kept.shape)}, and the new weights are "
                        f"{array.dtype}{list(array.shape)}: they are quantized in another way"
                    )
                new[self._first[param.path] + offset] = array
        return new


def _is_plain(param: ParamSpec) -> bool:
    """Its numbers are kept one by one, as llm.params shows them."""
    return not param.kinds or (len(param.runs) == 1 and isinstance(param.runs[0][0], DenseKind))


def _without_padding(array: Any, layout: Layout) -> Any:
    return array[(slice(None),) * layout.axis + (slice(layout.stored_rows),)]


def _difference(running: ModelSpec, other: ModelSpec) -> str | None:
    """The first difference between the configs of two models, apart from where they come from."""
    if running.family.name != other.family.name:
        return f"it is of the family {other.family.name}, and that of {running.family.name}"
    for field in dataclasses.fields(DecoderConfig):
        mine, theirs = (getattr(spec.config, field.name) for spec in (running, other))
        if mine != theirs:
            return f"its {field.name} is {_short(theirs)}, and that of the other {_short(mine)}"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
