"""What each layer is told of a token besides the hidden states (Gemma 3n and 4)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.embedding import VocabEmbedding
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.options import BuildOptions


@dataclass(frozen=True)
class PerLayerConfig:
    """The inputs of single layers: their size in each layer, and the tokens that have some."""

    size: int
    vocab_size: int


class PerLayerInputs(nnx.Module):
    """The mean of an embedding of the token for every layer, and of a normed projection of the one that all begin with.

    It is multiplied by the root of two, so that its variance is that of one of them.
    """

    def __init__(self, config: PerLayerConfig, size: int, num_layers: int, norm_eps: float, options: BuildOptions):
        self.embed = VocabEmbedding(config.vocab_size, num_layers * config.size, options)
        self.projection = Linear(size, num_layers * config.size, options)
        self.norm = RMSNorm(config.size, norm_eps, options.kernels)
        self.shape = (num_layers, config.size)
        self.scale = size**-0.5

    def __call__(self, tokens: Int[Array, "T"], x: Float[Array, "T E"]) -> Float[Array, "T L n"]:
        """The inputs of every layer; `x` are the scaled embeddings."""
        rows = self.embed(tokens).reshape(-1, *self.shape).astype(jnp.float32) * self.shape[1] ** 0.5
        projected = self.norm((self.projection.partial(x) * self.scale).reshape(-1, *self.shape))
        return ((rows + projected) * 2**-0.5).astype(x.dtype)


class PerLayerGate(nnx.Module):
    """`x + norm(projection(act(gate(x)) * given))`, with which a layer takes in its own input."""

    def __init__(self, config: PerLayerConfig, size: int, activation: str, norm_eps: float, options: BuildOptions):
        self.gate = Linear(size, config.size, options)
        self.projection = Linear(config.size, size, options)
        self.norm = RMSNorm(size, norm_eps, options.kernels)
        self.activation = activation

    def __call__(self, x: Float[Array, "T E"], given: Float[Array, "T n"]) -> Float[Array, "T E"]:
        gate = ACTIVATIONS[self.activation](self.gate.partial(x))
        return x + self.norm(self.projection((gate * given).astype(x.dtype)))
