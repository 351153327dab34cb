"""A model's shapes without its memory, and the parts of a running model for those who take it apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.layers.low_rank import AdapterTable
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.models.registry import ModelSpec
from jaxllm.quantization.weight import DenseKind, Weight, WeightKind
from jaxllm.weights.loader import ParamSpec


def abstract_model(
    spec: ModelSpec, options: BuildOptions, kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None
) -> tuple[Decoder | Encoder, list[ParamSpec]]:
    """The module with abstract weights, and its parameters in the order of `nnx.split`'s leaves.

    `kinds` says what each weight is kept as: one kind, or one a segment; without it all are dense, as declared.

    Raises:
        CheckpointError: a shard would part numbers that a kind stores together.
    """
    model = spec.build(options)
    _, state = nnx.split(model)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    specs = []
    for path, variable in leaves:
        declared = param_spec(".".join(str(key.key) for key in path), variable)
        if declared.kinds and (kinds is not None or declared.host is not None):
            declared = replace(declared, kinds=declared.kinds if kinds is None else kinds(declared))
            declared.check_shards(options.tp)
            variable.set_value(declared.abstract())
        specs.append(declared)
    nnx.update(model, state)
    return model, specs


@dataclass(frozen=True)
class AdaptedModel:
    """A model that adds what adapters give, without its parameters and tables.

    Attributes:
        tables: those arrays, `[places, ...]`, in the order in which `merged` takes them.
    """

    graph: Any
    tree: Any
    tables: tuple[ParamSpec, ...]

    def merged(self, parameters: Any, tables: Sequence[jax.Array]) -> Decoder:
        """The model with the parameters that `nnx.split` gives of the model without adapters, and with tables."""
        model: Decoder = nnx.merge(self.graph, parameters, jax.tree.unflatten(self.tree, tables))
        return model


def adapted_model(spec: ModelSpec, options: BuildOptions, sizes: AdapterSizes) -> AdaptedModel:
    """The model of `abstract_model` with tables of adapters."""
    split: Any = nnx.split  # whose result mypy cannot take apart
    graph, _, tables = split(spec.build(replace(options, adapters=sizes)), nnx.Param, AdapterTable)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tables, is_leaf=lambda x: isinstance(x, nnx.Variable))
    specs = tuple(param_spec(".".join(str(key.key) for key in path), variable) for path, variable in leaves)
    return AdaptedModel(graph, jax.tree.structure(tables), specs)


def param_spec(path: str, variable: nnx.Variable) -> ParamSpec:
    """A parameter as its module declares it."""
    value, metadata = variable.get_value(), variable.get_metadata()
    if not isinstance(value, Weight):
        return ParamSpec(path, value.shape, np.dtype(value.dtype), metadata["axes"], metadata["layout"])
    dtype = np.dtype(jax.tree.leaves(value)[0].dtype)
    kinds = (DenseKind(dtype),)
    return ParamSpec(path, value.shape, dtype, metadata["axes"], metadata["layout"], kinds, metadata["host"])


class ModelParts(NamedTuple):
    """A model as an engine runs it, but for its weights."""

    spec: ModelSpec
    options: BuildOptions
    params: Sequence[ParamSpec]
    mesh: Mesh


class LiveModel(NamedTuple):
    """A model that an engine runs."""

    parts: ModelParts
    arrays: Callable[[], Sequence[jax.Array]]
    """Those of all parameters now: the leaves of one after the other, in the order of `parts.params`."""
