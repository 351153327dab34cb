"""An engine's model as a pure function of its parameters, and the attention of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxllm.compat import under_own_settings
from jaxllm.errors import InvalidRequestError
from jaxllm.models.caches import Buffer, CacheLayout, PerSlot, Shared, parts_of
from jaxllm.models.decoder import Decoder
from jaxllm.models.registry import ModelParts, abstract_model
from jaxllm.pallas_kernels.whole import WATCHED, WHOLE, whole_sequences
from jaxllm.quantization.weight import Dense, Weight
from jaxllm.requests.captures import integers
from jaxllm.sharding.mesh import TENSOR
from jaxllm.weights.loader import ParamSpec

MOST_TOKENS = 512  # a text's limit: attention weights grow with the square of its length
ModelArrays = Mapping[str, jax.Array]  # by their paths, such as "layers.0.mlp.down.weight"


class OpenModel:
    """The decoder that an engine serves, built again over plain arrays and kernels that have a derivative."""

    def __init__(self, parts: ModelParts):
        """Raises InvalidRequestError for an encoder, which predicts no tokens."""
        if parts.spec.config.encoder is not None:
            raise InvalidRequestError(f"{parts.spec.family.name} is an encoder; only decoders have logits of tokens")
        self.parts = parts
        self._config = parts.spec.config
        model, self._specs = abstract_model(
            parts.spec, replace(parts.options, kernels=WHOLE, adapters=None, host_experts=0)
        )
        self._graph, state = nnx.split(model)
        self._tree = jax.tree.structure(state)
        self.axes = {spec.path: P(*spec.axes) for spec in self._specs}

    def params(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The engine's weights, from `LiveModel.arrays`: the same arrays if they are plain, otherwise expanded."""
        kept = [spec.abstract() for spec in self.parts.params]
        values = jax.tree.unflatten(jax.tree.structure(kept), arrays)
        pairs = zip(self.parts.params, self._specs, values, strict=True)
        return {plain.path: self._plain(value, spec, plain) for spec, plain, value in pairs}

    def module(self, params: ModelArrays) -> Decoder:
        """The Flax module; its collectives run inside `shard_map` over the engine's mesh."""
        return self.merged(self._graph, params)

    def merged(self, graph: Any, params: ModelArrays) -> Decoder:
        model: Any = nnx.merge(graph, jax.tree.unflatten(self._tree, [params[path] for path in self.axes]))
        return model  # type: ignore[no-any-return]

    @under_own_settings
    def logits(
        self, params: ModelArrays, tokens: Int[Array, "*B T"], embeddings: Float[Array, "*B T E"] | None = None
    ) -> Float[Array, "*B T V"]:
        """The logits after each token of a sequence, or of several of one length; float32.

        Raises InvalidRequestError if `tokens` is neither `[T]` nor `[B, T]`, or `embeddings` or `params` do not fit.
        """
        if tokens.ndim not in (1, 2) or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
            kind = f"{tokens.dtype}{list(tokens.shape)}"
            raise InvalidRequestError(f"tokens is {kind}; it must be integers, [T] or [B, T]", "tokens")
        if params.keys() != self.axes.keys():
            odd = sorted(params.keys() ^ self.axes.keys())
            raise InvalidRequestError(f"params differs from llm.params in {', '.join(odd[:4])}", "params")
        if embeddings is not None:
            expected = (*tokens.shape, self._config.hidden_size)
            if embeddings.shape != expected:
                raise InvalidRequestError(
                    f"embeddings is {list(embeddings.shape)}; it must be {list(expected)}", "embeddings"
                )
            embeddings = embeddings.reshape(-1, expected[-1]).astype(self.parts.options.dtype)
        out = self._run(dict(params), tokens.reshape(-1, tokens.shape[-1]), embeddings)
        return out.reshape(*tokens.shape, -1)

    @cached_property
    def _run(self) -> Any:
        mapped = jax.shard_map(
            self._forward, mesh=self.parts.mesh, in_specs=(self.axes, P(), P()), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)

    def _forward(
        self, params: ModelArrays, tokens: Int[Array, "B T"], embeddings: Float[Array, "N E"] | None
    ) -> Float[Array, "N V"]:
        model = self.module(params)
        count, length = tokens.shape
        hidden, _ = model(tokens.reshape(-1), self.caches(count), whole_sequences(count, length), embeddings)
        return model.logits(hidden)

    def caches(self, count: int) -> tuple[tuple[jax.Array, ...], ...]:
        """Zeros for the states of `count` sequences, and for padding's; keys and values are not kept in pages."""
        layout = CacheLayout(np.dtype(np.float32), 1, self.parts.options.tp)

        def zeros(buffer: Buffer) -> jax.Array:
            shape = NamedSharding(self.parts.mesh, P(*buffer.axes)).shard_shape(buffer.shape)
            return jnp.zeros(shape, buffer.dtype)

        kept = ([part for part in parts_of([spec]) if isinstance(part, PerSlot)] for spec in self._config.caches)
        return tuple(
            tuple(zeros(buffer) for state in states for buffer in layout.buffers(state, 0, count + 1))
            for states in kept
        )

    def _plain(self, value: Any, spec: ParamSpec, plain: ParamSpec) -> jax.Array:
        if not isinstance(value, Weight):
            return value
        if isinstance(value, Dense) and value.array.dtype == plain.dtype:
            return value.array
        leaves, tree = jax.tree.flatten(value)
        axes = tuple(P(*leaf.axes) for leaf in spec.leaves())
        expanded: jax.Array = _expanding(self.parts.mesh, tree, axes, P(*plain.axes), plain.dtype)(*leaves)
        return expanded


@cache
def _expanding(mesh: Mesh, tree: Any, axes: tuple[P, ...], out: P, dtype: np.dtype) -> Callable[..., jax.Array]:
    def expand(*leaves: jax.Array) -> jax.Array:
        weight: Weight = jax.tree.unflatten(tree, leaves)
        return weight.dequantize().astype(dtype)

    return jax.jit(jax.shard_map(expand, mesh=mesh, in_specs=axes, out_specs=out, check_vma=False))


class LayerAttention(NamedTuple):
    """One layer's attention, float32. Keys and queries are as they meet: after any norm and rotation, before the scale.

    Attributes:
        weights: `[H, T, T]`: how much each token (the second axis) takes of each before it (the third). A row's sum is
            1, or less if the model has sinks.
        queries: `[T, H, D]`.
        keys, values: `[T, K, D]`, as the KV cache holds them.
    """

    weights: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class Watched:
    """A model whose attention can be observed."""

    def __init__(self, model: OpenModel):
        self._parts = model.parts
        self.model = model
        watched, _ = abstract_model(self._parts.spec, replace(self._parts.options, kernels=WATCHED, adapters=None))
        self._graph, _ = nnx.split(watched)
        self._run = jax.jit(self._on_the_mesh, static_argnums=0)

    @under_own_settings
    def attention(self, params: ModelArrays, tokens: Int[Array, "T"], layers: object) -> dict[int, LayerAttention]:
        """Layers' attention by number. Raises InvalidRequestError for a long text, a wrong layer, or latent keys."""
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
            partial(self._forward, layers), mesh=self._parts.mesh, in_specs=(self.model.axes, P()),
            out_specs=[(P(TENSOR), heads, heads, heads)] * len(layers), check_vma=False,
        )  # fmt: skip
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
        self, layer: int, weights: Float[Array, "H T T"], queries: Float[Array, "T H D"], keys: Float[Array, "T N D"],
        values: Float[Array, "T N D"],
    ) -> LayerAttention:  # fmt: skip
        """On the host, each KV head once: with more devices than heads, several have the same one."""
        spec, config = self._parts.spec.config.caches[layer], self._parts.spec.config
        owner = config.layers[spec.layer if isinstance(spec, Shared) else layer]
        repeats = keys.shape[1] // config.num_kv_heads_of(owner)
        held = (np.asarray(array)[:, ::repeats] for array in (keys, values))
        return LayerAttention(np.asarray(weights), np.asarray(queries), *held)
