"""What tells one decoder-only model from another, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxllm.models.caches import CacheSpec, Paged, PerSlot
from jaxllm.models.layers.attention import QKNorm, QueryScaling
from jaxllm.models.layers.conv import ConvConfig
from jaxllm.models.layers.mla import MLAConfig
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.rope import RopeConfig

NormKind = Literal["rms", "layer", "layer_unbiased"]
MixerKind = Literal["attention", "conv"]
"""What lets a layer's tokens see those before them."""


@dataclass(frozen=True)
class LayerKind:
    """What one layer does that others may not: its mixer, rotation (None: no positions), sliding window, experts."""

    rope: RopeConfig | None
    window: int | None = None
    sparse: bool = False
    mixer: MixerKind = "attention"


class LengthRule(NamedTuple):
    """Sequences longer than `original_length` tokens are rotated otherwise than shorter ones.

    With `all_or_none` every position of such a sequence is, so that one which outgrows it is computed anew.
    """

    original_length: int
    all_or_none: bool


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only model. Lengths are in tokens; what a family does not mention it does not have.

    Attributes:
        intermediate_size: of the dense MLPs; the experts' is in `moe`.
        layers: one entry a layer.
        norm: "rms" (RMSNorm), "layer" (LayerNorm with bias) or "layer_unbiased".
        qk_norm: on queries and keys: "rms" or "layer" with one weight for all heads, "layer_per_head", or "rms_whole",
            which takes the mean over all heads of a token together.
        qk_norm_rotated: that norm is taken after the rotation.
        pre_norms: attention and MLP have a norm in front.
        post_norms: attention and MLP have a norm on their output, before the residual sum.
        parallel_residual: attention and MLP read the same norm, and both are added to the residual.
        gated_mlp: `down(act(gate(x)) * up(x))`; otherwise `down(act(up(x)))`.
        attention_sinks: one more logit a head, learnt, that takes part of attention's weight and has no value.
        attention_scale: on the logits; None is one over the root of the head size.
        residual_scale: on the output of attention and of the MLP, before the residual sum.
        logit_scale: on the output's logits.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` on attention logits and on the output's.
        num_labels: rows of a classification head in place of the vocabulary's; 0 is a language model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerKind, ...]
    norm_eps: float
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    norm: NormKind = "rms"
    qk_norm: QKNorm | None = None
    qk_norm_rotated: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel_residual: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_sinks: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    query_scaling: QueryScaling | None = None
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    conv: ConvConfig | None = None
    num_labels: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_outputs(self) -> int:
        """Scores that the head gives: one a token of the vocabulary, or one a class."""
        return self.num_labels or self.vocab_size

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def length_rule(self) -> LengthRule | None:
        """How the rotary embedding depends on a sequence's length, if it does."""
        found = [rope for rope in self.ropes if rope.depends_on_length]
        return LengthRule(found[0].original_length, found[0].kind == "longrope") if found else None

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps of earlier tokens."""
        return tuple(self._cache(layer) for layer in self.layers)

    @property
    def page_groups(self) -> tuple[Paged, ...]:
        """The different pages of the layers that keep any; one page table serves them all."""
        return tuple(dict.fromkeys(spec for spec in self.caches if isinstance(spec, Paged)))

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each sequence."""
        return any(isinstance(spec, PerSlot) for spec in self.caches)

    def _cache(self, layer: LayerKind) -> CacheSpec:
        if layer.mixer == "conv":
            assert self.conv is not None
            return self.conv.cache(self.hidden_size)
        if self.mla:  # the latent is cached as one head
            return Paged(1, (self.mla.latent_dim,), layer.window)
        return Paged(self.num_kv_heads, (self.head_dim, self.head_dim), layer.window)
