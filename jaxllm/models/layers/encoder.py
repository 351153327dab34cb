"""What encoders have besides the layers of a decoder: learnt positions, what stands for a text, heads over that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.linear import Linear, param
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.norm import LayerNorm
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.tasks import Pooling

HeadActivation = Literal["identity", "tanh", "relu", "gelu", "silu"]
_HEAD_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x, "tanh": jnp.tanh, **ACTIVATIONS
}  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """A product that follows pooling: sentence-transformers' Dense. `size` are the channels that it gives."""

    size: int
    activation: HeadActivation = "identity"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A classification head: what it takes of a text, and the product in front of that with the classes, if any.

    Attributes:
        activation: of that product; None where there is none.
        dense_bias, output_bias: of that product, and of the one with the classes.
        norm: a LayerNorm without bias follows the activation.
    """

    pooling: Pooling = "cls"
    activation: HeadActivation | None = "tanh"
    dense_bias: bool = True
    norm: bool = False
    output_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """What tells one encoder from another besides the fields of a DecoderConfig.

    Attributes:
        positions: rows of the table of learnt positions; 0 where there is none.
        first_position: which of them a text's first token has.
        token_types: kinds of tokens that have an embedding of their own, as the two texts of a pair; 0 for none.
        embedding_norm: a norm follows the embeddings.
        sum_norms: `post_norms` are taken of the residual sums, not of what is added (BERT).
        first_norm: the first layer has a norm in front of its attention as the others have.
        last_norm: a norm follows the last layer.
        classifier: the head of a model that classifies.
        pooling: what the projections are made of, where there are any.
        projections: products that follow pooling, one after the other.
    """

    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    embedding_norm: bool = False
    sum_norms: bool = False
    first_norm: bool = True
    last_norm: bool = True
    classifier: ClassifierConfig = ClassifierConfig()
    pooling: Pooling = "mean"
    projections: tuple[Projection, ...] = ()


class TokenPlaces(nnx.Module):
    """What is added to a token's embedding for its position in its text, and for the text of a pair that it is of."""

    def __init__(self, config: EncoderConfig, size: int, options: BuildOptions):
        self.positions = param((config.positions, size), options.dtype) if config.positions else None
        self.types = param((config.token_types, size), options.dtype) if config.token_types else None
        self.first = config.first_position

    def __call__(self, x: Float[Array, "T E"], meta: StepMetadata) -> Float[Array, "T E"]:
        """The sum, in float32."""
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
        """float32."""
        x = pooled if self.dense is None else _HEAD_ACTIVATIONS[self.activation](self.dense(pooled))
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
            x = _HEAD_ACTIVATIONS[activation](product(x.astype(jnp.float32)))
        return x


def pool_texts(x: Float[Array, "T E"], meta: StepMetadata, pooling: Pooling) -> Float[Array, "S E"]:
    """What stands for each text of the step, in float32; of no meaning where there is none."""
    if pooling != "mean":
        row = meta.query_start[:-1] if pooling == "cls" else jnp.maximum(meta.query_start[1:] - 1, 0)
        return x.at[row].get(mode="clip").astype(jnp.float32)
    seqs = meta.context_len.shape[0]
    sums = jax.ops.segment_sum(x.astype(jnp.float32), meta.seq_ids, seqs + 1)[:-1]
    return sums / jnp.maximum(jnp.diff(meta.query_start), 1)[:, None]


def at_each_token(pooled: Float[Array, "S E"], seq_ids: Int[Array, "T"]) -> Float[Array, "T E"]:
    """What its text pools to, in the row of each of its tokens."""
    return pooled.at[seq_ids].get(mode="clip")
