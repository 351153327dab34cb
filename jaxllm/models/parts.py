"""What a running model is made of, for those who take it apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec
from jaxllm.weights.loader import ParamSpec


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
