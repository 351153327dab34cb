"""The encoder that every bidirectional family is a configuration of: whole texts in, vectors or classes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.caches import Cache
from jaxllm.models.config import ClassifierConfig, DecoderConfig, EncoderConfig, Projection, check_parallel
from jaxllm.models.decoder import DecoderLayer, Late, without_padding
from jaxllm.models.layers.linear import Linear, VocabEmbedding, param
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.norm import LayerNorm, norm_of_kind
from jaxllm.models.layers.rope import Angles, rope_angles
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.outputs import Pooling

HEAD_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x, "tanh": jnp.tanh, **ACTIVATIONS
}  # fmt: skip


class Encoder(nnx.Module):
    """Embeddings, a stack of layers whose tokens see all of their text, and what follows them.

    A step has whole texts. Where something is made of what stands for a text, by projections or a classification head,
    that is what is in the row of each of its tokens, whichever of them is read.
    """

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        check_parallel(config, options.tp, options.expert_parallel)
        encoder, size = config.encoder, config.hidden_size
        assert encoder is not None
        norm = partial(norm_of_kind, config.norm, size, config.norm_eps, options.kernels)
        self.config = config
        self.kernels = options.kernels
        self.embed = VocabEmbedding(config.vocab_size, size, options)
        self.places = TokenPlaces(encoder, size, options) if encoder.positions or encoder.token_types else None
        self.embedding_norm = norm() if encoder.embedding_norm else None
        kind = SumNormLayer if encoder.sum_norms else DecoderLayer
        self.layers = nnx.List([kind(config, i, options) for i in range(config.num_layers)])
        if not encoder.first_norm:
            self.layers[0].attention_norm = None
        self.norm = norm() if encoder.last_norm else None
        head = (encoder.classifier, size, config.num_labels, config.norm_eps, options)
        self.classifier = Classifier(*head) if config.num_labels else None
        projections = encoder.projections
        self.projections = Projections(projections, size, options) if projections and not config.num_labels else None

    def __call__(
        self, tokens: Int[Array, "T"], caches: tuple[Cache, ...], meta: StepMetadata
    ) -> tuple[Float[Array, "T E"], tuple[Cache, ...]]:
        """The last hidden states of `tokens`, or what stands for their texts. Nothing is kept in `caches`."""
        config = self.config
        x = self._embedded(tokens, meta)
        angles: dict[Any, Angles | None] = {None: None}
        angles |= {rope: rope_angles(rope, meta.positions, meta.rotary_lengths) for rope in config.ropes}
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = run_layer(*nnx.split(layer), x, angles[config.layers[index].rope], meta)
        if self.norm is not None:
            x = self.norm(x)
        encoder = config.encoder
        assert encoder is not None
        if self.classifier is not None:
            pooled = pool_texts(x, meta, encoder.classifier.pooling)
        elif self.projections is not None:
            pooled = self.projections(pool_texts(x, meta, encoder.pooling))
        else:
            return x, caches
        return pooled.at[meta.seq_ids].get(mode="clip"), caches  # in the row of each of a text's tokens

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R n"]:
        """float32 scores of the classes, of what stands for a text. Only a model that classifies has them."""
        assert self.classifier is not None, "the front door refuses to classify with a model that has no head"
        return self.classifier(hidden)

    def _embedded(self, tokens: Int[Array, "T"], meta: StepMetadata) -> Float[Array, "T E"]:
        x = self.embed(tokens)
        dtype = x.dtype
        if self.config.embedding_scale != 1.0:
            x = (x * self.config.embedding_scale).astype(dtype)
        if self.places is not None:
            x = self.places(x, meta)
        x = (x if self.embedding_norm is None else self.embedding_norm(x)).astype(dtype)
        return without_padding(x, meta, self.kernels)


class SumNormLayer(DecoderLayer):
    """`x = norm(x + mixer(x))`, then `x = norm(x + mlp(x))`: the norms come after the residual sums."""

    def __init__(self, config: DecoderConfig, index: int, options: BuildOptions):
        super().__init__(replace(config, pre_norms=False, post_norms=True), index, options)
        self.kernels = options.kernels

    def __call__(
        self, x: Float[Array, "T E"], late: Late | None, angles: Angles | None, cache: Cache,
        meta: StepMetadata, given: Float[Array, "T p"] | None = None,
    ) -> tuple[Float[Array, "T E"], Late | None, Cache]:  # fmt: skip
        assert self.attention_post_norm is not None and self.mlp_post_norm is not None and self.mlp is not None
        x, cache = self._mix(x, angles, cache, meta, residual=x)
        x = without_padding(self.attention_post_norm(x), meta, self.kernels)  # which biases have filled
        return without_padding(self.mlp_post_norm(self.mlp(x, meta, residual=x)), meta, self.kernels), None, cache


@partial(jax.jit, static_argnums=0)
def run_layer(graph: Any, weights: Any, x: jax.Array, angles: Angles | None, meta: StepMetadata) -> jax.Array:
    x, late, _ = nnx.merge(graph, weights)(x, None, angles, (), meta)
    assert late is None, "layers that leave a sum to the next one are a decoder's"
    return x


class TokenPlaces(nnx.Module):
    """Embeddings of a token's position in its text, and of the text of a pair that it belongs to."""

    def __init__(self, config: EncoderConfig, size: int, options: BuildOptions):
        self.positions = param((config.positions, size), options.dtype) if config.positions else None
        self.types = param((config.token_types, size), options.dtype) if config.token_types else None
        self.first = config.first_position

    def __call__(self, x: Float[Array, "T E"], meta: StepMetadata) -> Float[Array, "T E"]:
        x = x.astype(jnp.float32)
        if self.types is not None:
            x = x + (self.types[...][0] if meta.token_types is None else self.types[...][meta.token_types])
        return x if self.positions is None else x + self.positions[...][meta.positions + self.first]


class Classifier(nnx.Module):
    """Scores of the classes, of what stands for a text."""

    def __init__(self, config: ClassifierConfig, size: int, num_labels: int, norm_eps: float, options: BuildOptions):
        self.dense = None if config.activation is None else Linear(size, size, options, config.dense_bias)
        self.activation = config.activation or "identity"
        self.norm = LayerNorm(size, norm_eps, options.kernels, bias=False) if config.norm else None
        self.output = Linear(size, num_labels, options, config.output_bias)

    def __call__(self, pooled: Float[Array, "R E"]) -> Float[Array, "R n"]:
        x = pooled if self.dense is None else HEAD_ACTIVATIONS[self.activation](self.dense(pooled))
        return self.output(x if self.norm is None else self.norm(x)).astype(jnp.float32)


class Projections(nnx.Module):
    """Products with activations, one after the other."""

    def __init__(self, configs: tuple[Projection, ...], size: int, options: BuildOptions):
        inputs = (size, *(config.size for config in configs))
        pairs = zip(inputs, configs, strict=False)
        self.products = nnx.List([Linear(i, config.size, options, config.bias) for i, config in pairs])
        self.activations = tuple(config.activation for config in configs)

    def __call__(self, x: Float[Array, "S i"]) -> Float[Array, "S o"]:
        """float32 throughout, for these are few rows."""
        for product, activation in zip(self.products, self.activations, strict=True):
            x = HEAD_ACTIVATIONS[activation](product(x.astype(jnp.float32)))
        return x


def pool_texts(x: Float[Array, "T E"], meta: StepMetadata, pooling: Pooling) -> Float[Array, "S E"]:
    """The vector of each text of the step, in float32; of no meaning where there is none."""
    if pooling != "mean":
        row = meta.query_start[:-1] if pooling == "cls" else jnp.maximum(meta.query_start[1:] - 1, 0)
        return x.at[row].get(mode="clip").astype(jnp.float32)
    seqs = meta.context_len.shape[0]
    sums = jax.ops.segment_sum(x.astype(jnp.float32), meta.seq_ids, seqs + 1)[:-1]
    return sums / jnp.maximum(jnp.diff(meta.query_start), 1)[:, None]
