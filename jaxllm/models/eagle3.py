"""EAGLE-3 heads (arXiv:2503.01840): a layer that was trained to say what a given model will say next.

It reads states from between the model's layers, joined by a product to one of its own size, and the embedding of the
token after them. Its layer is Llama's but for attention, which reads both side by side. Further tokens it predicts from
its own states. Its output head has the most frequent tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.caches import Cache
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder, without_padding
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.embedding import VocabEmbedding
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.mlp import GatedMLP
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.params import param
from jaxllm.models.layers.rope import Angles, rope_angles
from jaxllm.models.options import BuildOptions
from jaxllm.models.predictor import Head, Predicted
from jaxllm.pallas_kernels import Kernels, StepMetadata


@dataclass(frozen=True)
class Eagle3Config:
    """What a head has besides a Llama of one layer.

    Attributes:
        layers: it reads the states in front of these layers of the model, in ascending order.
        target_size: of the model's states.
        num_outputs: how many tokens its output head has.
        reduced: these are not all tokens, so that it says which they are.
        own_embedding: it has one, and does not use the model's.
        norm_before_residual: what attention is added to is the normed state.
    """

    layers: tuple[int, ...]
    target_size: int
    num_outputs: int
    reduced: bool
    own_embedding: bool
    norm_before_residual: bool


class Eagle3Layer(nnx.Module):
    """Llama's layer, but for attention, which reads the norms of an embedding and of a state side by side."""

    def __init__(self, config: DecoderConfig, eagle: Eagle3Config, options: BuildOptions):
        size, eps, kernels = config.hidden_size, config.norm_eps, options.kernels
        self.attention_norm = RMSNorm(size, eps, kernels)
        self.hidden_norm = RMSNorm(size, eps, kernels)
        self.attention = Attention(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            options,
            input_size=2 * size,
            bias=config.qkv_bias,
            output_bias=config.output_bias,
        )
        self.mlp_norm = RMSNorm(size, eps, kernels)
        self.mlp = GatedMLP(size, config.intermediate_size, config.hidden_act, options, config.mlp_bias)
        self.norm_before_residual = eagle.norm_before_residual

    def __call__(
        self, embeddings: Float[Array, "T E"], hidden: Float[Array, "T E"], angles: Angles, pages: Any,
        meta: StepMetadata,
    ) -> tuple[Float[Array, "T E"], Any]:  # fmt: skip
        """The state behind it, and its pages."""
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.attention_norm(embeddings), normed], axis=-1)
        residual = normed if self.norm_before_residual else hidden
        x, pages = self.attention(both, angles, pages, meta, residual=residual)
        return self.mlp(x, meta, norm=self.mlp_norm.traced, residual=x), pages


class Eagle3Head(Decoder):
    """Its layer's state behind each token is normed for its output head, and is the next token's state."""

    def __init__(self, config: DecoderConfig, eagle: Eagle3Config, options: BuildOptions):
        super().__init__(config, options)
        del self.layers
        if not eagle.own_embedding:
            del self.embed
        self.layer = Eagle3Layer(config, eagle, options)
        self.join = Linear(len(eagle.layers) * eagle.target_size, config.hidden_size, options, adaptable=False)
        self.head = VocabEmbedding(eagle.num_outputs, config.hidden_size, options)
        self.targets = param((eagle.num_outputs,), jnp.int32) if eagle.reduced else None
        self.own_embedding = eagle.own_embedding

    def read(self, states: Float[Array, "T n"]) -> Float[Array, "T E"]:
        """What it makes of the model's states, side by side."""
        return self.join(states)

    def embed_for(self, model: Decoder, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows of its own table, or of the model's."""
        return self.embed(tokens) if self.own_embedding else model.embed(tokens)

    def predict(
        self,
        embeddings: Float[Array, "T E"],
        hidden: Float[Array, "T E"],
        caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:
        """`embeddings` are of the tokens behind those whose states are `hidden`; `meta` has the positions of these."""
        (pages,), (rope,) = caches, self.config.ropes
        angles = rope_angles(rope, meta.positions, meta.rotary_lengths)
        hidden = without_padding(hidden.astype(embeddings.dtype), meta, self.kernels)
        embeddings = without_padding(embeddings, meta, self.kernels)
        state, pages = self.layer(embeddings, hidden, angles, pages, meta)
        return Predicted(self.norm(state), state, (pages,))

    def head_for(self, model: Decoder) -> Head:
        """Scores of all the model's tokens."""
        return self if self.targets is None else _ReducedHead(self, model.config.num_outputs)


class _ReducedHead:
    """A head that has some of a vocabulary's tokens; the others are impossible."""

    def __init__(self, head: Eagle3Head, vocab_size: int):
        assert head.targets is not None
        self._head = head
        self._targets = head.targets[...]
        self._vocab_size = vocab_size

    @property
    def kernels(self) -> Kernels:
        return self._head.kernels

    def most_likely(self, hidden: Any) -> Any:
        """As `Decoder.most_likely`."""
        found = self._head.most_likely(hidden)
        return None if found is None else self._targets[found]

    def logits(self, hidden: Any) -> Any:
        """As `Decoder.logits`."""
        scores = self._head.logits(hidden)
        everything = jnp.full((len(scores), self._vocab_size), -jnp.inf, scores.dtype)
        return everything.at[:, self._targets].set(scores)
