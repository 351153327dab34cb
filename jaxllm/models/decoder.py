"""The decoder-only transformer that every family is a configuration of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.caches import Cache, PerSlot, Shared, parts_of
from jaxllm.models.config import DecoderConfig, LayerKind, MixerKind, check_parallel
from jaxllm.models.layers.attention import Attention, MLAttention
from jaxllm.models.layers.hands import Hand, LayerHand, Told, summed, summing, tap, telling
from jaxllm.models.layers.host_experts import split_places, with_places
from jaxllm.models.layers.linear import VocabEmbedding, adapter_numbers, param
from jaxllm.models.layers.mlp import MLP, GatedMLP, PerLayerGate, PerLayerInputs
from jaxllm.models.layers.moe import DenseBesideMoE, MoE
from jaxllm.models.layers.norm import LayerNorm, RMSNorm, norm_of_kind
from jaxllm.models.layers.recurrent import GatedDeltaNet, ShortConv, StateSpaceDual
from jaxllm.models.layers.rope import Angles, rope_angles
from jaxllm.models.options import BuildOptions, Stage
from jaxllm.pallas_kernels import LATER, Kernels, Late, Norm, Residual, StepMetadata, with_late

Mixer = Attention | MLAttention | ShortConv | GatedDeltaNet | StateSpaceDual
PADDING_TOKEN = 0  # which stands for a row of an image where a layer has inputs of its own: of Gemma
LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever the config says of the others


class Decoder(nnx.Module):
    """Embedding, a stack of layers, a last norm, and the output head."""

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        check_parallel(config, options.tp, options.expert_parallel, options.dp)
        vocab, size, per_layer = config.vocab_size, config.hidden_size, config.per_layer
        stage = options.stage or Stage(0, 1, 0, config.num_layers)
        self.config = config
        self.kernels = options.kernels
        self.stage = stage
        embeds = stage.first or (stage.last and config.tie_word_embeddings)
        self.embed: VocabEmbedding = VocabEmbedding(vocab, size, options) if embeds else _elsewhere()
        self.embedding_norm = _norm(config, options) if config.embedding_norm and stage.first else None
        self.layers: Any = nnx.List(
            [decoder_layer(config, i, options) if i in stage.layers else _elsewhere() for i in range(config.num_layers)]
        )
        learned = config.learned_positions and stage.first
        self.positions = param((config.max_position_embeddings, size), options.dtype) if learned else None
        count, eps = config.num_layers, config.norm_eps
        self.per_layer = PerLayerInputs(per_layer, size, count, eps, options) if per_layer else None
        self.adapter_gains = adapter_numbers(options.adapters)
        self.norm: RMSNorm | LayerNorm = _norm(config, options) if stage.last else _elsewhere()
        has_head = stage.last and not config.tie_word_embeddings
        self.head = VocabEmbedding(config.num_outputs, size, options, config.head_bias) if has_head else None

    def __call__(
        self, tokens: Int[Array, "T"], caches: tuple[Cache, ...], meta: StepMetadata,
        embeddings: Float[Array, "T E"] | None = None, hands: Sequence[Hand] = (),
    ) -> tuple[Float[Array, "T E"], tuple[Cache, ...]]:  # fmt: skip
        """The last hidden states of `tokens`, and each layer's cache with what it keeps of them.

        `embeddings` take the place of the rows of the table. A stage of the model takes there what the stage before it
        gave, and gives what its last layer does. `hands` are what others do to the model meanwhile.
        """
        config, stage = self.config, self.stage
        if self.adapter_gains is not None:
            meta = replace(meta, adapter_gains=self.adapter_gains[...])
        if meta.images is not None:
            tokens = jnp.where(meta.images.row_of >= 0, PADDING_TOKEN, tokens)
        x = self._begun(tokens, meta, embeddings, hands) if stage.first else embeddings
        assert x is not None, "a stage goes on from what the one before it gave"
        angles: dict[Any, Angles | None] = {None: None}
        angles |= {
            rope: rope_angles(rope, meta.positions, meta.rotary_lengths, meta.rope_places) for rope in config.ropes
        }
        x = without_padding(x, meta, self.kernels)
        with telling(Told(meta)):
            given = None if self.per_layer is None else self.per_layer(tokens, x)
        images, meta = meta.images, meta if meta.images is None else replace(meta, images=None)
        specs, late = config.caches, None
        written, places = split_places(caches)
        in_layers = [hand for hand in hands if hand.layers is not None]
        for index in stage.layers:
            graph, weights = nnx.split(self.layers[index])
            spec = specs[index]
            owner = spec.layer if isinstance(spec, Shared) else index
            for hand in hands:
                hand.before(index, x, late)
            told = tuple((hand.layers, hand.layer(index, x)) for hand in in_layers)
            with jax.named_scope(f"layer_{index}"):
                x, late, written[owner], places[index], taken = _run_layer(
                    graph, tuple(kind for kind, _ in told), weights, x, late, angles[config.layers[index].rope],
                    written[owner], places[index], meta, None if given is None else given[:, index],
                    tuple(data for _, data in told),
                )  # fmt: skip
            if images is not None and (index + 2) * x.shape[1] <= images.rows.shape[1]:
                x = x + images.part(index + 1, x)
            for hand, data in zip(in_layers, taken, strict=True):
                hand.took(index, data)
        kept = with_places(written, places)
        if not stage.last:
            return with_late(x, late), kept
        if self.kernels.add_norm is not None and late is not None:
            return self.kernels.add_norm(x, late, self.norm.traced)[1], kept
        hidden = self.norm(x)
        for hand in hands:
            hand.last(hidden)
        return hidden, kept

    def _begun(
        self, tokens: Int[Array, "T"], meta: StepMetadata, embeddings: Float[Array, "T E"] | None, hands: Sequence[Hand]
    ) -> Float[Array, "T E"]:
        x = self.embed(tokens) if embeddings is None else embeddings
        if self.config.embedding_scale != 1.0:
            x = (x * self.config.embedding_scale).astype(x.dtype)
        if meta.images is not None:
            x = meta.images.placed(x)
        for hand in hands:
            x = hand.begin(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x if self.positions is None else x + self.positions[...][meta.positions]

    def most_likely(self, hidden: Float[Array, "R E"]) -> Int[Array, "R"] | None:
        """The token with the highest score of each row, where the kernels find it without the scores."""
        return (self.head or self.embed).most_likely(hidden)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores over the vocabulary, or over the classes of a model that classifies."""
        logits = (self.head or self.embed).logits(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Elsewhere(nnx.Module):
    """Stands for a layer or a table that another stage has, so that those of this one keep their names."""


def _elsewhere() -> Any:
    return Elsewhere()


def without_padding(x: Float[Array, "T E"], meta: StepMetadata, kernels: Kernels) -> Float[Array, "T E"]:
    """`x` with zeros where there is no token: the C++ kernels pass over such rows at the end. As it is for others."""
    return jnp.where(meta.live[:, None], x, 0) if kernels.native else x


class DecoderLayer(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`: in turn, or both from one norm. One of the two may be missing.

    There may be norms on the outputs too, or only there, and a factor on what is added. A layer may end with a gate for
    an input of its own, and with a factor on all that it gives. The mixer lets tokens see those before them; there may
    be two, whose outputs are added. The layer has each under the name of its kind.
    """

    def __init__(self, config: DecoderConfig, index: int, options: BuildOptions):
        self.mixers = config.layers[index].mixers
        self.attention_norm = _norm(config, options) if config.pre_norms and self.mixers else None
        for mixer in self.mixers:
            setattr(self, mixer, _mixer(config, mixer, index, options))
        self.mixer_scales = tuple(_mixer_scale(config, mixer) for mixer in self.mixers)
        self.num_states = sum(len(s.shapes) for s in parts_of([config.caches[index]]) if isinstance(s, PerSlot))
        self.parallel = config.parallel_residual
        has_mlp = config.layers[index].mlp
        one_norm = self.parallel and not config.parallel_norms
        self.mlp_norm = _norm(config, options) if has_mlp and config.pre_norms and not one_norm else None
        self.mlp = _mlp(config, index, options) if has_mlp else None
        self.attention_post_norm = _norm(config, options) if config.post_norms else None
        self.mlp_post_norm = _norm(config, options) if has_mlp and config.post_norms else None
        self.residual_scale = config.residual_scale
        self.mlp_scale = config.residual_scale * config.mlp_out_scale
        size, act, eps, inputs = config.hidden_size, config.hidden_act, config.norm_eps, config.per_layer
        self.per_layer = PerLayerGate(inputs, size, act, eps, options) if inputs else None
        self.scale = param((1,), jnp.float32) if config.layer_scale else None

    def __call__(
        self, x: Float[Array, "T E"], late: Late | None, angles: Angles | None, cache: Cache,
        meta: StepMetadata, given: Float[Array, "T n"] | None = None,
    ) -> tuple[Float[Array, "T E"], Late | None, Cache]:  # fmt: skip
        """The layer's output in two parts, the second of which is to be added; None where the first is all of it."""
        assert late is None, "this layer adds up all of its own output, as those before it do"
        before = x
        tap("residual_before", x)
        if self.mixers:
            post, norm = self.attention_post_norm, self.attention_norm
            at_once = post is None and self.residual_scale == 1.0 and self.mixer_scales == (1.0,)
            with summing("attention_out" if at_once else None):
                out, cache = self._mix(x, angles, cache, meta, norm and norm.traced, x if at_once else None)
            x = out if at_once else _sum("attention_out", x, _added(out, post, self.residual_scale))
        tap("residual_middle", x)
        if self.mlp is not None:
            norm, source = (self.mlp_norm or self.attention_norm, before) if self.parallel else (self.mlp_norm, x)
            post, block = self.mlp_post_norm, self.mlp

            def mlp(residual: Float[Array, "T E"] | None) -> Float[Array, "T E"]:
                return block(source, meta, norm=norm and norm.traced, residual=residual)

            if post is None and self.mlp_scale == 1.0:
                x = summed("mlp_out", mlp, x)
            else:
                x = _sum("mlp_out", x, _added(mlp(None), post, self.mlp_scale))
        if self.per_layer is not None:
            assert given is not None
            x = self.per_layer(x, given)
        return x if self.scale is None else (x * self.scale[...]).astype(x.dtype), None, cache

    def _mix(
        self, x: Float[Array, "T E"], angles: Angles | None, cache: Cache, meta: StepMetadata,
        norm: Norm | None = None, residual: Residual = None,
    ) -> tuple[Late, Cache]:  # fmt: skip
        """The mixers' outputs for `norm(x)`, summed; a single one adds `residual`. States come first in the cache."""
        parts = (cache,) if len(self.mixers) == 1 else (cache[: self.num_states], cache[self.num_states :])
        total, kept = None, ()
        for mixer, scale, own in zip(self.mixers, self.mixer_scales, parts, strict=True):
            out, after = getattr(self, mixer)(x, angles, own, meta, norm=norm, residual=residual)
            out = out if scale == 1.0 else (out * scale).astype(out.dtype)
            total, kept = out if total is None else total + out, (*kept, *after)
        assert total is not None, "a layer without mixers mixes nothing"
        return total, kept


class LateSumLayer(DecoderLayer):
    """The layer of kernels that add and norm at once: each sum is left to the norm after it, in the next layer too."""

    def __init__(self, config: DecoderConfig, index: int, options: BuildOptions):
        super().__init__(config, index, options)
        self.add_norm = options.kernels.add_norm

    @staticmethod
    def takes(config: DecoderConfig, index: int, options: BuildOptions) -> bool:
        """The kernels have such an operation, and the layer's norms and sums are the plain ones."""
        layer = config.layers[index]
        own_norms = config.norm != "rms" or not config.pre_norms or config.post_norms or config.parallel_residual
        scaled = not config.residual_scale == config.mlp_out_scale == 1.0 or config.layer_scale
        has_kernel = options.kernels.add_norm is not None and bool(layer.mixers or layer.mlp)
        return has_kernel and not own_norms and not scaled and config.per_layer is None

    def __call__(
        self, x: Float[Array, "T E"], late: Late | None, angles: Angles | None, cache: Cache,
        meta: StepMetadata, given: Float[Array, "T n"] | None = None,
    ) -> tuple[Float[Array, "T E"], Late | None, Cache]:  # fmt: skip
        assert self.add_norm is not None
        first = self.attention_norm or self.mlp_norm
        assert first is not None, "takes() says that there is one"
        x, normed = (x, first.traced(x)) if late is None else self.add_norm(x, late, first.traced)
        if self.mixers:
            out, cache = self._mix(normed, angles, cache, meta, None, LATER if self.mixer_scales == (1.0,) else None)
            if self.mlp is None or self.mlp_norm is None:
                return x, out, cache
            x, normed = self.add_norm(x, out, self.mlp_norm.traced)
        assert self.mlp is not None
        if isinstance(self.mlp, MoE):
            return x, self.mlp.unsummed(normed, meta), cache
        return x, self.mlp(normed, meta, residual=LATER), cache


def decoder_layer(config: DecoderConfig, index: int, options: BuildOptions) -> DecoderLayer:
    """The layer as the kernels have it."""
    return (LateSumLayer if LateSumLayer.takes(config, index, options) else DecoderLayer)(config, index, options)


def _sum(point: str, x: Float[Array, "T E"], out: Float[Array, "T E"]) -> Float[Array, "T E"]:
    tap(point, out)
    return x + out


def _added(out: Float[Array, "T E"], post: Norm | None, scale: float) -> Float[Array, "T E"]:
    out = out if post is None else post(out)
    return out if scale == 1.0 else (out * scale).astype(out.dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graph: Any, kinds: tuple[type[LayerHand], ...], weights: Any, x: Any, late: Any, angles: Any, cache: Cache,
    places: Any, meta: StepMetadata, given: Any, told: tuple[Any, ...],
) -> Any:  # fmt: skip
    """One layer with the hands in it, traced once for all layers that differ by nothing but their weights."""
    hands = [kind(data) for kind, data in zip(kinds, told, strict=True)]
    layer = nnx.merge(graph, weights)
    run = DecoderLayer.__call__ if any(kind.whole for kind in kinds) else type(layer).__call__
    with telling(Told(meta, hands, places)) as context:
        x, late, cache = run(layer, x, late, angles, cache, meta, given)
        for hand in hands:
            x = hand.end(x)
        tap("residual", x)
    return x, late, cache, context.places, tuple(hand.data for hand in hands)


def _norm(config: DecoderConfig, options: BuildOptions) -> RMSNorm | LayerNorm:
    return norm_of_kind(config.norm, config.hidden_size, config.norm_eps, options.kernels)


def _mixer(config: DecoderConfig, mixer: MixerKind, index: int, options: BuildOptions) -> Mixer:
    size, eps = config.hidden_size, config.norm_eps
    if mixer == "conv":
        assert config.conv is not None
        return ShortConv(size, config.conv, options)
    if mixer == "delta":
        assert config.delta is not None
        return GatedDeltaNet(size, config.delta, options, activation=config.hidden_act, norm_eps=eps)
    if mixer == "ssd":
        assert config.ssd is not None
        return StateSpaceDual(size, config.ssd, eps, options)
    return _attention(config, config.layers[index], options)


def _attention(config: DecoderConfig, kind: LayerKind, options: BuildOptions) -> Attention | MLAttention:
    scaling = config.query_scaling
    if config.mla:
        return MLAttention(
            config.hidden_size, config.num_heads, config.mla, options,
            scale=config.attention_scale or config.mla.qk_head_dim**-0.5, norm_eps=LATENT_NORM_EPS,
            qkv_bias=config.qkv_bias, output_bias=config.output_bias, query_scaling=scaling,
        )  # fmt: skip
    scales_queries = scaling is not None and not (scaling.unrotated_only and kind.rope is not None)
    return Attention(
        config.hidden_size, config.num_heads, config.num_kv_heads_of(kind), config.head_dim_of(kind), options,
        scale=config.attention_scale, window=kind.window, chunked=kind.chunked, softcap=config.attention_softcap,
        bias=config.qkv_bias, qkv_clip=config.qkv_clip, output_bias=config.output_bias,
        qk_norm=None if config.qk_norm == "unit" and kind.rope is None else config.qk_norm,
        qk_norm_rotated=config.qk_norm_rotated, norm_eps=config.norm_eps,
        query_scaling=scaling if scales_queries else None, sinks=config.attention_sinks, alibi=config.alibi,
        value_norm=config.value_norm, keys_are_values=kind.keys_are_values, has_kv=kind.shares_kv_of is None,
        gate=config.attention_gate, causal=config.encoder is None, sees_images=kind.sees_images,
    )  # fmt: skip


def _mixer_scale(config: DecoderConfig, mixer: MixerKind) -> float:
    if mixer == "ssd":
        assert config.ssd is not None
        return config.ssd.out_scale
    return config.attention_out_scale if mixer == "attention" else 1.0


def _mlp(config: DecoderConfig, index: int, options: BuildOptions) -> GatedMLP | MLP | MoE | DenseBesideMoE:
    layer = config.layers[index]
    size, hidden, act = config.hidden_size, config.intermediate_size_of(layer), config.hidden_act
    if layer.sparse:
        assert config.moe is not None
        if config.moe.beside_dense:
            return DenseBesideMoE(size, hidden, config.moe, act, config.norm_eps, options)
        return MoE(size, config.moe, act, options)
    sizes = size, hidden, act, options, config.mlp_bias
    return GatedMLP(*sizes, config.mlp_gate_scale) if config.gated_mlp else MLP(*sizes)
