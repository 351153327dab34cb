"""A model's shapes without its memory."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from jaxllm.models.decoder import BuildOptions, Decoder
from jaxllm.models.registry import ModelSpec
from jaxllm.weights.loader import ParamSpec


def abstract_model(spec: ModelSpec, options: BuildOptions) -> tuple[Decoder, list[ParamSpec]]:
    """The module with abstract weights, and its parameters in the order of `nnx.split`'s leaves."""
    model = nnx.eval_shape(lambda: spec.build(options))
    _, state = nnx.split(model)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    specs = []
    for path, variable in leaves:
        name = ".".join(str(key.key) for key in path)
        value = variable.get_value()
        metadata = variable.get_metadata()
        specs.append(ParamSpec(name, value.shape, np.dtype(value.dtype), metadata["axes"], metadata["layout"]))
    return model, specs
