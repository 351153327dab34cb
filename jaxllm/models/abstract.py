"""A model's shapes without its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from jaxllm.models.decoder import Decoder
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec
from jaxllm.quantization.weight import DenseKind, Weight, WeightKind
from jaxllm.weights.loader import ParamSpec


def abstract_model(
    spec: ModelSpec, options: BuildOptions, kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None
) -> tuple[Decoder, list[ParamSpec]]:
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
        if declared.kinds and kinds is not None:
            declared = replace(declared, kinds=kinds(declared))
            declared.check_shards(options.tp)
            variable.set_value(declared.abstract())
        specs.append(declared)
    nnx.update(model, state)
    return model, specs


def param_spec(path: str, variable: nnx.Variable) -> ParamSpec:
    """A parameter as its module declares it."""
    value, metadata = variable.get_value(), variable.get_metadata()
    if not isinstance(value, Weight):
        return ParamSpec(path, value.shape, np.dtype(value.dtype), metadata["axes"], metadata["layout"])
    dtype = np.dtype(jax.tree.leaves(value)[0].dtype)
    return ParamSpec(path, value.shape, dtype, metadata["axes"], metadata["layout"], (DenseKind(dtype),))
