"""What the layers of a model attend by, over the whole of a short text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxllm.compat import under_own_settings
from jaxllm.errors import InvalidRequestError
from jaxllm.models.abstract import abstract_model
from jaxllm.models.caches import Shared
from jaxllm.pallas_kernels.whole import WATCHED, whole_sequences
from jaxllm.requests.captures import integers
from jaxllm.research.model import ModelArrays, OpenModel
from jaxllm.sharding.mesh import TENSOR

MOST_TOKENS = 512
"""Weights grow with the square of a text's length."""


class LayerAttention(NamedTuple):
    """One layer's, float32. Keys and queries are as they meet: after any norm and rotation, before the scale.

    Attributes:
        weights: `[H, T, T]`: how much each token (the second axis) takes of each before it (the third). A row's sum is
            1, or less where the model has sinks.
        queries: `[T, H, D]`.
        keys, values: `[T, K, D]`, as the KV cache holds them.
    """

    weights: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class Watched:
    """A model whose attention shows what it attends by."""

    def __init__(self, model: OpenModel):
        self._parts = model.parts
        self.model = model
        watched, _ = abstract_model(self._parts.spec, replace(self._parts.options, kernels=WATCHED, adapters=None))
        self._graph, _ = nnx.split(watched)
        self._run = jax.jit(self._on_the_mesh, static_argnums=0)

    @under_own_settings
    def attention(self, params: ModelArrays, tokens: Int[Array, "T"], layers: object) -> dict[int, LayerAttention]:
        """What layers attend by, by their numbers.

        Raises:
            InvalidRequestError: there are too many tokens, a layer is not there or does not attend, or its keys are
                latents.
        """
        if len(tokens) > MOST_TOKENS:
            raise InvalidRequestError(f"prompt has {len(tokens)} tokens; accepted are up to {MOST_TOKENS}", "prompt")
        wanted = self._read(layers)
        found = self._run(tuple(wanted), dict(params), tokens)
        return {layer: self._settled(layer, *arrays) for layer, arrays in zip(wanted, found, strict=True)}

    def _read(self, layers: object) -> list[int]:
        config = self._parts.spec.config
        if config.mla is not None:
            raise InvalidRequestError(
                f"{self._parts.spec.family.name} attends to latents, which each head reads in its own way; accepted "
                "are models with keys and values",
                "layers",
            )
        attending = [index for index, layer in enumerate(config.layers) if "attention" in layer.mixers]
        wanted = attending if layers is True else integers(layers)
        bad = next((layer for layer in wanted if layer % config.num_layers not in attending), None)
        if not wanted or bad is not None or any(not -config.num_layers <= i < config.num_layers for i in wanted):
            known = ", ".join(map(str, attending))
            raise InvalidRequestError(
                f"layers is {layers!r}; it must be True, or some of those that have attention: {known}", "layers"
            )
        return list(dict.fromkeys(layer % config.num_layers for layer in wanted))

    def _on_the_mesh(self, layers: tuple[int, ...], params: ModelArrays, tokens: Int[Array, "T"]) -> Any:
        heads = P(None, TENSOR)
        mapped = jax.shard_map(
            partial(self._forward, layers),
            mesh=self._parts.mesh,
            in_specs=(self.model.axes, P()),
            out_specs=[(P(TENSOR), heads, heads, heads)] * len(layers),
            check_vma=False,
        )
        return mapped(params, tokens)

    def _forward(self, layers: tuple[int, ...], params: Mapping[str, jax.Array], tokens: Int[Array, "T"]) -> Any:
        model = self.model.merged(self._graph, params)
        _, kept = model(tokens, self.model.caches(1), whole_sequences(1, len(tokens)))
        specs = self._parts.spec.config.caches
        found = []
        for layer in layers:
            spec = specs[layer]
            owner = spec.layer if isinstance(spec, Shared) else layer
            before = sum(isinstance(other, Shared) and other.layer == owner for other in specs[:layer])
            place = 0 if owner == layer else 1 + before
            keys, values, *watched = kept[owner][model.layers[owner].num_states :]
            queries, weights = watched[2 * place : 2 * place + 2]
            found.append((weights, queries, keys, values))
        return [tuple(array[0].astype(jnp.float32) for array in arrays) for arrays in found]

    def _settled(
        self,
        layer: int,
        weights: Float[Array, "H T T"],
        queries: Float[Array, "T H D"],
        keys: Float[Array, "T N D"],
        values: Float[Array, "T N D"],
    ) -> LayerAttention:
        """On the host, each KV head once: where there are more devices than heads, several have the same one."""
        spec, config = self._parts.spec.config.caches[layer], self._parts.spec.config
        owner = config.layers[spec.layer if isinstance(spec, Shared) else layer]
        repeats = keys.shape[1] // config.num_kv_heads_of(owner)
        held = (np.asarray(array)[:, ::repeats] for array in (keys, values))
        return LayerAttention(np.asarray(weights), np.asarray(queries), *held)
