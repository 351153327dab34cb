"""A decoder-only model as data, checks that its sizes go together, and the numbers of devices that divide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.caches import CacheSpec, Joined, Paged, PerSlot, Shared, parts_of
from jaxllm.models.layers.attention import MLAConfig, QKNorm, QueryScaling
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.mlp import ACTIVATIONS, XIELU, PerLayerConfig
from jaxllm.models.layers.recurrent import ConvConfig, DeltaConfig, SSDConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.requests.captures import LayerShapes
from jaxllm.requests.outputs import Pooling
from jaxllm.weights.fields import shown

NormKind = Literal["rms", "layer", "layer_unbiased", "unit", "layer_unit"]
MixerKind = Literal["attention", "conv", "delta", "ssd"]  # what lets a layer's tokens see those before them
MIXERS_BESIDE: dict[Literal["attention_beside_ssd"], tuple[MixerKind, ...]] = {
    "attention_beside_ssd": ("ssd", "attention")
}
"""Several that read one norm, and whose outputs are added, in the order of what they keep."""


@dataclass(frozen=True)
class LayerKind:
    """One layer, which may differ from others: its mixer, rotation (None: no positions), window, MLP, experts.

    Attributes:
        chunked: a token sees those from the last multiple of `window` on.
        head_dim, num_kv_heads, intermediate_size: of this layer, where they are not those of the model.
        keys_are_values: values are the keys before norm and rotation: one product makes both.
        shares_kv_of: an earlier layer, whose keys and values this one attends to; it has none of its own.
        sees_images: tokens of an image see each other, the later ones too.
    """

    rope: RopeConfig | None
    window: int | None = None
    sparse: bool = False
    mixer: MixerKind | Literal["attention_beside_ssd"] | None = "attention"
    mlp: bool = True
    chunked: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    keys_are_values: bool = False
    shares_kv_of: int | None = None
    sees_images: bool = False

    @property
    def mixers(self) -> tuple[MixerKind, ...]:
        if self.mixer is None:
            return ()
        return MIXERS_BESIDE[self.mixer] if self.mixer == "attention_beside_ssd" else (self.mixer,)

    @property
    def attends(self) -> bool:
        """The layer keeps keys and values of every token."""
        return "attention" in self.mixers

    @property
    def dense(self) -> bool:
        return self.mlp and not self.sparse


HeadActivation = Literal["identity", "tanh", "relu", "gelu", "silu"]


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
    """The properties of an encoder that are no fields of a DecoderConfig.

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
        num_heads, num_kv_heads, head_dim: of attention, 0 in a model without any.
        layers: one entry a layer.
        norm: "rms" (RMSNorm), "layer" (LayerNorm with bias) or "layer_unbiased"; "unit" and "layer_unit" are the same
            two without weights.
        qk_norm: on queries and keys: "rms" or "layer" with one weight for all heads, "layer_per_head", "rms_whole",
            which takes the mean over all heads of a token together, or "unit", without weight and on those layers alone
            that rotate.
        qk_norm_rotated: that norm is taken after the rotation.
        value_norm: values are divided by their root mean square, a head at a time.
        pre_norms: attention and MLP have a norm in front.
        post_norms: attention and MLP have a norm on their output, before the residual sum.
        parallel_residual: attention and MLP read the same norm, and both are added to the residual.
        parallel_norms: then the MLP reads a norm of its own of the same.
        embedding_norm: the embedding is normed before the first layer.
        learned_positions: a vector is added to a token's embedding for its position, of `max_position_embeddings`.
        gated_mlp: `down(act(gate(x)) * up(x))`; otherwise `down(act(up(x)))`.
        attention_gate: each head's output is multiplied by the sigmoid of a gate, which is projected beside its query.
        attention_sinks: one more logit a head, learnt, that takes part of attention's weight and has no value.
        alibi: logits of attention fall with the distance of the two tokens, this steeply; see `alibi_slopes`.
        attention_scale: on the logits; None is one over the root of the head size.
        residual_scale: on the output of attention and of the MLP, before the residual sum.
        attention_out_scale: on the output of attention, besides.
        mlp_gate_scale, mlp_out_scale: on the gate of dense MLPs before its activation, and on their output, besides.
        logit_scale: on the output's logits.
        layer_scale: a learnt factor on what each layer gives.
        per_layer: inputs that each layer has besides what the one before it gives.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` on attention logits and on the output's.
        qkv_clip: numbers of queries, keys and values that are further than that from 0 become as far as that.
        encoder: set where tokens see later ones too, so that nothing is generated; a `LayerKind`'s window then
            reaches as far to both sides.
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
    value_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel_residual: bool = False
    parallel_norms: bool = False
    embedding_norm: bool = False
    learned_positions: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    mlp_out_scale: float = 1.0
    logit_scale: float = 1.0
    layer_scale: bool = False
    per_layer: PerLayerConfig | None = None
    attention_gate: bool = False
    attention_sinks: bool = False
    alibi: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    qkv_clip: float | None = None
    logit_softcap: float | None = None
    query_scaling: QueryScaling | None = None
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    conv: ConvConfig | None = None
    delta: DeltaConfig | None = None
    ssd: SSDConfig | None = None
    encoder: EncoderConfig | None = None
    num_labels: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_outputs(self) -> int:
        """Scores that the head gives: one a token of the vocabulary, or one a class."""
        return self.num_labels or self.vocab_size

    @property
    def attends(self) -> bool:
        """Some layer keeps keys and values of every token."""
        return any(layer.attends for layer in self.layers)

    @property
    def vector_size(self) -> int:
        projections = self.encoder.projections if self.encoder is not None and not self.num_labels else ()
        return projections[-1].size if projections else self.hidden_size

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def length_rule(self) -> LengthRule | None:
        """The rule by which the rotary embedding depends on a sequence's length, if it does."""
        found = [rope for rope in self.ropes if rope.depends_on_length]
        return LengthRule(found[0].original_length, found[0].kind == "longrope") if found else None

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return tuple(self._cache(layer) for layer in self.layers)

    @property
    def page_groups(self) -> tuple[Paged, ...]:
        """The different pages of the layers that keep any; one page table serves them all."""
        return tuple(dict.fromkeys(spec for spec in parts_of(self.caches) if isinstance(spec, Paged)))

    @property
    def has_states(self) -> bool:
        """Some layer keeps a state of each sequence."""
        return any(isinstance(spec, PerSlot) for spec in parts_of(self.caches))

    def head_dim_of(self, layer: LayerKind) -> int:
        return layer.head_dim or self.head_dim

    @property
    def kv_heads(self) -> tuple[tuple[int, int] | None, ...]:
        """Of each layer that has keys and values of its own, how many heads they have, and their size."""
        return tuple(
            (self.num_kv_heads_of(layer), self.head_dim_of(layer))
            if "attention" in layer.mixers and layer.shares_kv_of is None and self.mla is None
            else None
            for layer in self.layers
        )

    @property
    def layer_shapes(self) -> LayerShapes:
        return LayerShapes(self.hidden_size, self.kv_heads)

    def num_kv_heads_of(self, layer: LayerKind) -> int:
        return layer.num_kv_heads or self.num_kv_heads

    def intermediate_size_of(self, layer: LayerKind) -> int:
        return layer.intermediate_size or self.intermediate_size

    def _cache(self, layer: LayerKind) -> CacheSpec:
        if self.encoder is not None:
            return None
        if layer.shares_kv_of is not None:
            return Shared(layer.shares_kv_of)
        kept = tuple(self._kept(mixer, layer) for mixer in layer.mixers)
        return Joined(kept) if len(kept) > 1 else kept[0] if kept else None

    def _kept(self, mixer: MixerKind, layer: LayerKind) -> Paged | PerSlot:
        if mixer == "conv":
            assert self.conv is not None
            return self.conv.cache(self.hidden_size)
        if mixer == "delta":
            assert self.delta is not None
            return self.delta.cache
        if mixer == "ssd":
            assert self.ssd is not None
            return self.ssd.cache
        if self.mla:  # the latent is cached as one head
            return Paged(1, (self.mla.latent_dim,), layer.window)
        return Paged(self.num_kv_heads_of(layer), (self.head_dim_of(layer),) * 2, layer.window, layer.chunked)


def check_decoder(c: DecoderConfig) -> None:
    """Raises CheckpointError naming the sizes that do not fit, whatever format they were read from."""
    if c.hidden_act not in ACTIVATIONS and (c.hidden_act != XIELU or c.gated_mlp or c.moe is not None):
        _refuse("the activation", shown(c.hidden_act), ", ".join(ACTIVATIONS))
    if not c.layers:
        _refuse("the number of layers", 0, "1 or more")
    if c.attends:
        _check_heads(c)
    if c.ssd is None and any(layer.mixer == "ssd" for layer in c.layers):
        _refuse("the number of state-space heads", 0, "1 or more in a model with state-space layers")
    if c.ssd is not None and c.ssd.heads % c.ssd.groups:
        _refuse("the number of state-space groups", c.ssd.groups, f"a divisor of {c.ssd.heads} heads")
    if c.conv is None and any(layer.mixer == "conv" for layer in c.layers):
        _refuse("the number of tokens that a convolution sees", 0, "2 or more in a model with convolutions")
    for mixer in (c.ssd, c.conv):
        if mixer is not None and mixer.kernel < 2:
            _refuse("the number of tokens that a convolution sees", mixer.kernel, "2 or more")
    if any(layer.chunked and layer.window is None for layer in c.layers):
        _refuse("the size of attention's chunks", "missing", "1 or more in a model with layers of chunks")
    if (delta := c.delta) is not None and delta.value_heads % delta.key_heads:
        _refuse("the number of key heads of linear attention", delta.key_heads, f"a divisor of {delta.value_heads}")
    if c.moe is None and any(layer.sparse for layer in c.layers):
        _refuse("the number of experts", 0, "1 or more in a model with sparse layers")
    for layer in dict.fromkeys(c.layers):
        if layer.rope is not None:
            _check_rope(layer.rope, c.mla.qk_rope_head_dim if c.mla else c.head_dim_of(layer))


def check_direction(c: dict[str, Any], config: DecoderConfig) -> None:
    """Raises CheckpointError where a config.json asks for attention to later tokens, which its family has none of."""
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if c.get(key) is value and config.encoder is None:
            _refuse(key, value, f"{not value} or null, since this family is not served as an encoder")


def _check_heads(c: DecoderConfig) -> None:
    if c.head_dim < 1:
        _refuse("the size of a head", c.head_dim, f"1 or more, {c.num_heads} of which share {c.hidden_size} channels")
    for count in map(c.num_kv_heads_of, c.layers):
        if c.mla is None and c.num_heads % count:
            _refuse("the number of key-value heads", count, f"a divisor of {c.num_heads} heads")
    if c.mla and min(c.mla.qk_nope_head_dim, c.mla.qk_rope_head_dim, c.mla.v_head_dim) < 1:
        _refuse("one of the head sizes of latent attention", c.mla, "1 or more")


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    least = 4 if rope.kind == "dynamic" else 2  # dynamic scaling divides by two less
    if rope.dim % 2 or not least <= rope.dim <= head_dim:
        _refuse("the number of rotary channels", rope.dim, f"an even number from {least} to a head's {head_dim}")
    if not rope.mixed and sum(rope.sections) not in (0, rope.dim // 2):
        _refuse("mrope_section", rope.sections, f"numbers whose sum is {rope.dim // 2}")
    if rope.kind == "llama3" and rope.high_freq_factor < rope.low_freq_factor:
        _refuse("high_freq_factor", rope.high_freq_factor, f"low_freq_factor ({rope.low_freq_factor}) or more")
    for name in ("short_divisors", "long_divisors", "divisors"):
        divisors = getattr(rope, name)
        wanted = bool(divisors) or (rope.kind == "longrope" and name != "divisors")
        if wanted and len(divisors) != rope.dim // 2:
            _refuse(f"the number of {name} of the rotary embedding", len(divisors), str(rope.dim // 2))


def _refuse(what: str, value: object, accepted: str) -> None:
    raise CheckpointError(f"{what} is {value}; accepted is {accepted}")


class Divided(NamedTuple):
    """Something that is shared out among devices; what is `replicable` may also be on several of them."""

    label: str
    size: int
    replicable: bool = False

    def fits(self, degree: int) -> bool:
        return self.size % degree == 0 or (self.replicable and degree % self.size == 0)


def allowed_degrees(config: DecoderConfig, expert_parallel: bool = False, most: int = 64) -> list[int]:
    """The degrees up to `most` at which every head and every MLP row, or expert, has a device of its own."""
    return [degree for degree in range(1, most + 1) if all(d.fits(degree) for d in _divided(config, expert_parallel))]


def check_parallel(config: DecoderConfig, tp: int, expert_parallel: bool = False, dp: int = 1) -> None:
    """Raises ConfigError naming the allowed degrees when `tp` does not divide the model.

    With `expert_parallel` the devices of `dp` batches share the experts.
    """
    if expert_parallel and config.moe is None:
        raise ConfigError("enable_expert_parallel is true, but this model has no experts; accepted is false")
    allowed = allowed_degrees(config, expert_parallel, max(tp, 64))
    if tp not in allowed:
        sizes = ", ".join(d.label for d in _divided(config, expert_parallel))
        raise ConfigError(
            f"tensor_parallel_size is {tp}, which does not divide this model ({sizes}); accepted are "
            f"{', '.join(map(str, allowed))}"
        )
    if expert_parallel and config.moe is not None and config.moe.num_experts % (tp * dp):
        raise ConfigError(
            f"data_parallel_size is {dp} and tensor_parallel_size is {tp}, with enable_dp_attention and "
            f"enable_expert_parallel: {config.moe.num_experts} experts are not shared equally by {tp * dp} devices"
        )


def _divided(config: DecoderConfig, expert_parallel: bool) -> list[Divided]:
    found = [Divided(f"{config.num_heads} heads", config.num_heads)] if config.attends else []
    if config.conv:
        found.append(Divided(f"{config.hidden_size} channels", config.hidden_size))
    if config.delta:
        found.append(Divided(f"{config.delta.key_heads} key heads of linear attention", config.delta.key_heads))
    if ssd := config.ssd:
        found.append(Divided(f"{ssd.heads} state-space heads", ssd.heads))
        found.append(Divided(f"{ssd.groups} state-space groups", ssd.groups, replicable=True))
    if config.attends and not config.mla:
        counts = dict.fromkeys(config.num_kv_heads_of(layer) for layer in config.layers if layer.attends)
        found += [Divided(f"{count} KV heads", count, replicable=True) for count in counts]
    beside_experts = config.moe is not None and config.moe.beside_dense
    dense = [layer for layer in config.layers if layer.dense or beside_experts]
    found += [Divided(f"MLP size {size}", size) for size in dict.fromkeys(map(config.intermediate_size_of, dense))]
    if moe := config.moe:
        found.append(
            Divided(f"{moe.num_experts} experts", moe.num_experts)
            if expert_parallel
            else Divided(f"expert size {moe.hidden}", moe.hidden)
        )
        if moe.shared_hidden:
            found.append(Divided(f"shared expert size {moe.shared_hidden}", moe.shared_hidden))
    return found
