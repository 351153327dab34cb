"""The decoder-only transformer that every family is a configuration of."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.caches import Cache, Shared
from jaxllm.models.config import DecoderConfig
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.conv import ShortConv
from jaxllm.models.layers.embedding import VocabEmbedding
from jaxllm.models.layers.mla import MLAttention
from jaxllm.models.layers.mlp import MLP, GatedMLP
from jaxllm.models.layers.moe import MoE
from jaxllm.models.layers.norm import LayerNorm, RMSNorm
from jaxllm.models.layers.rope import Angles, rope_angles
from jaxllm.models.options import BuildOptions
from jaxllm.models.parallel import check_parallel
from jaxllm.pallas_kernels import Mixture, Norm, StepMetadata

Late = Float[Array, "T E"] | Mixture
"""What is yet to be added to the residual stream."""
LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever the config says of the others."""


class Decoder(nnx.Module):
    """Embedding, a stack of layers, a last norm, and the output head."""

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        check_parallel(config, options.tp, options.expert_parallel)
        vocab, size = config.vocab_size, config.hidden_size
        self.config = config
        self.kernels = options.kernels
        self.embed = VocabEmbedding(vocab, size, options)
        self.layers = nnx.List([DecoderLayer(config, i, options) for i in range(config.num_layers)])
        self.norm = _norm(config, options)
        self.head = (
            None if config.tie_word_embeddings else VocabEmbedding(config.num_outputs, size, options, config.head_bias)
        )

    def __call__(
        self, tokens: Int[Array, "T"], caches: tuple[Cache, ...], meta: StepMetadata
    ) -> tuple[Float[Array, "T E"], tuple[Cache, ...]]:
        """The last hidden states of `tokens`, and each layer's cache with what it keeps of them in."""
        config = self.config
        x = self.embed(tokens)
        if config.embedding_scale != 1.0:
            x = (x * config.embedding_scale).astype(x.dtype)
        angles: dict[Any, Angles | None] = {None: None}
        angles |= {rope: rope_angles(rope, meta.positions, meta.rotary_lengths) for rope in config.ropes}
        specs, written, late = config.caches, list(caches), None
        for index, layer in enumerate(self.layers):
            graph, weights = nnx.split(layer)
            spec = specs[index]
            owner = spec.layer if isinstance(spec, Shared) else index
            with jax.named_scope(f"layer_{index}"):
                x, late, written[owner] = _run_layer(
                    graph, weights, x, late, angles[config.layers[index].rope], written[owner], meta
                )
        if self.kernels.add_norm is not None and late is not None:
            return self.kernels.add_norm(x, late, self.norm.traced)[1], tuple(written)
        return self.norm(x), tuple(written)

    def most_likely(self, hidden: Float[Array, "R E"]) -> Int[Array, "R"] | None:
        """The token with the highest score of each row, where the kernels find it without the scores.

        A cap on the scores, and a factor on them, change nothing in their order.
        """
        return (self.head or self.embed).most_likely(hidden)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores over the vocabulary, or over the classes of a model that classifies."""
        logits = (self.head or self.embed).logits(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class DecoderLayer(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`: in turn, or both from one norm.

    There may be norms on the outputs too, or only there, and a factor on what is added.

    The mixer, which lets tokens see those before them, is attention or a convolution.
    """

    def __init__(self, config: DecoderConfig, index: int, options: BuildOptions):
        self.attention_norm = _norm(config, options) if config.pre_norms else None
        attends = config.layers[index].mixer == "attention"
        self.attention = _attention(config, index, options) if attends else None
        self.conv = None if attends else _conv(config, options)
        self.parallel = config.parallel_residual
        self.mlp_norm = _norm(config, options) if config.pre_norms and not self.parallel else None
        self.mlp = _mlp(config, index, options)
        self.attention_post_norm = _norm(config, options) if config.post_norms else None
        self.mlp_post_norm = _norm(config, options) if config.post_norms else None
        self.residual_scale = config.residual_scale
        plain = config.norm == "rms" and config.pre_norms and not config.parallel_residual and not config.post_norms
        self.add_norm = options.kernels.add_norm if plain and config.residual_scale == 1.0 else None

    def __call__(
        self, x: Float[Array, "T E"], late: Late | None, angles: Angles | None, cache: Cache,
        meta: StepMetadata,
    ) -> tuple[Float[Array, "T E"], Late | None, Cache]:  # fmt: skip
        """The layer's output in two parts, the second of which is to be added; None where the first is all of it.

        A kernel that adds and norms at once leaves each sum to the norm behind it, in the next layer as well.
        """
        if self.add_norm is None or self.attention_norm is None or self.mlp_norm is None:
            x, cache = self._whole(x, angles, cache, meta)
            return x, None, cache
        norm = self.attention_norm.traced
        x, normed = (x, norm(x)) if late is None else self.add_norm(x, late, norm)
        out, cache = self._mixer(normed, angles, cache, meta)
        x, normed = self.add_norm(x, out, self.mlp_norm.traced)
        late = self.mlp.unsummed(normed, meta) if isinstance(self.mlp, MoE) else self.mlp(normed, meta)
        return x, late, cache

    @property
    def _mixer(self) -> Attention | MLAttention | ShortConv:
        mixer = self.attention or self.conv
        assert mixer is not None
        return mixer

    def _whole(
        self, x: Float[Array, "T E"], angles: Angles | None, cache: Cache, meta: StepMetadata
    ) -> tuple[Float[Array, "T E"], Cache]:
        before, post = x, self.attention_post_norm
        at_once = post is None and self.residual_scale == 1.0
        residual = x if at_once else None
        out, cache = self._mixer(x, angles, cache, meta, norm=_traced(self.attention_norm), residual=residual)
        x = out if at_once else x + self._added(out, post)
        norm, source = (self.attention_norm, before) if self.parallel else (self.mlp_norm, x)
        post = self.mlp_post_norm
        out = self.mlp(source, meta, norm=_traced(norm), residual=x if at_once else None)
        return out if at_once else x + self._added(out, post), cache

    def _added(self, out: Float[Array, "T E"], post: Norm | None) -> Float[Array, "T E"]:
        """What the residual stream gets of a block's output."""
        out = out if post is None else post(out)
        return out if self.residual_scale == 1.0 else (out * self.residual_scale).astype(out.dtype)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: Any, weights: Any, x: Any, late: Any, angles: Any, cache: Cache, meta: StepMetadata) -> Any:
    """One layer. Being jitted, it is traced once for all layers that differ by nothing but their weights."""
    return nnx.merge(graph, weights)(x, late, angles, cache, meta)


def _norm(config: DecoderConfig, options: BuildOptions) -> RMSNorm | LayerNorm:
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps, options.kernels)
    return LayerNorm(config.hidden_size, config.norm_eps, options.kernels, bias=config.norm == "layer")


def _traced(norm: RMSNorm | LayerNorm | None) -> Norm | None:
    return None if norm is None else norm.traced


def _attention(config: DecoderConfig, index: int, options: BuildOptions) -> Attention | MLAttention:
    if config.mla:
        return MLAttention(
            config.hidden_size,
            config.num_heads,
            config.mla,
            options,
            scale=config.attention_scale or config.mla.qk_head_dim**-0.5,
            norm_eps=LATENT_NORM_EPS,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            query_scaling=config.query_scaling,
        )
    return Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        options,
        scale=config.attention_scale,
        window=config.layers[index].window,
        softcap=config.attention_softcap,
        bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        qk_norm_rotated=config.qk_norm_rotated,
        norm_eps=config.norm_eps,
        query_scaling=config.query_scaling,
        sinks=config.attention_sinks,
    )


def _conv(config: DecoderConfig, options: BuildOptions) -> ShortConv:
    assert config.conv is not None
    return ShortConv(config.hidden_size, config.conv, options)


def _mlp(config: DecoderConfig, index: int, options: BuildOptions) -> GatedMLP | MLP | MoE:
    if config.layers[index].sparse:
        assert config.moe is not None
        return MoE(config.hidden_size, config.moe, config.hidden_act, options)
    kind = GatedMLP if config.gated_mlp else MLP
    return kind(config.hidden_size, config.intermediate_size, config.hidden_act, options, config.mlp_bias)
