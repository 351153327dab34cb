"""What decoder-only families share: embedding, a stack of layers, a last norm, and the output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.errors import ConfigError
from jaxllm.models.layers.embedding import VocabEmbedding
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import RopeConfig, rope_angles
from jaxllm.pallas_kernels import AttentionMetadata, Pages


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every decoder-only family has; lengths in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        return self.rope

    @property
    def embedding_scale(self) -> float:
        """Factor on the token embeddings."""
        return 1.0


@dataclass(frozen=True)
class BuildOptions:
    """How a model is built, whatever its family."""

    dtype: Any = jnp.bfloat16
    tp: int = 1
    attention_backend: str = "auto"


class Decoder(nnx.Module):
    """A stack of `layer_class`; families differ by their layer and their config."""

    layer_class: ClassVar[Callable[..., nnx.Module]]

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        check_tensor_parallel(config, options.tp)
        self.config = config
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, options.tp, options.dtype)
        self.layers = nnx.List([self.layer_class(config, i, options) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = (
            None
            if config.tie_word_embeddings
            else VocabEmbedding(config.vocab_size, config.hidden_size, options.tp, options.dtype)
        )

    def __call__(
        self, tokens: Int[Array, "T"], pages: tuple[Pages, ...], meta: AttentionMetadata
    ) -> tuple[Float[Array, "T E"], tuple[Pages, ...]]:
        """The last hidden states of `tokens`, and the pages with their keys and values in."""
        config = self.config
        x = self.embed(tokens)
        if config.embedding_scale != 1.0:
            x = (x * config.embedding_scale).astype(x.dtype)
        ropes = [config.layer_rope(i) for i in range(config.num_layers)]
        angles = {rope: rope_angles(rope, config.head_dim, meta.positions) for rope in dict.fromkeys(ropes)}
        written = []
        for index, layer in enumerate(self.layers):
            graph, weights = nnx.split(layer)
            with jax.named_scope(f"layer_{index}"):
                x, page = _run_layer(graph, weights, x, angles[ropes[index]], pages[index], meta)
            written.append(page)
        return self.norm(x), tuple(written)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores over the vocabulary."""
        return (self.head or self.embed).logits(hidden)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: Any, weights: Any, x: jax.Array, angles: Any, pages: Pages, meta: AttentionMetadata) -> Any:
    """One layer. Being jitted, it is traced once for all layers that differ by nothing but their weights."""
    return nnx.merge(graph, weights)(x, angles, pages, meta)


def allowed_tensor_parallel(config: DecoderConfig, most: int = 64) -> list[int]:
    """The degrees up to `most` at which every head and every MLP row has a device of its own."""
    return [
        tp
        for tp in range(1, most + 1)
        if config.num_heads % tp == 0
        and config.intermediate_size % tp == 0
        and (config.num_kv_heads % tp == 0 or tp % config.num_kv_heads == 0)
    ]


def check_tensor_parallel(config: DecoderConfig, tp: int) -> None:
    """Raises ConfigError naming the allowed degrees when `tp` does not divide the model."""
    allowed = allowed_tensor_parallel(config, max(tp, 64))
    if tp not in allowed:
        raise ConfigError(
            f"tensor_parallel_size is {tp}, which does not divide this model ({config.num_heads} heads, "
            f"{config.num_kv_heads} KV heads, MLP size {config.intermediate_size}); accepted are "
            f"{', '.join(map(str, allowed))}"
        )
