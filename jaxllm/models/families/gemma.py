"""Gemma 1, 2, 3 and 4, text (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786).

All scale the embeddings by the root of their size and tie the head to them. Norms multiply by `1 + w` up to Gemma 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import ClassifierConfig, DecoderConfig, EncoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_rope, hf_windows, sliding_layers
from jaxllm.models.gguf import ABSENT, GgufFile, layer_types, nonzero, optional, rope_scaling, with_experts
from jaxllm.models.hf_fields import COUNT, SIZE, maybe
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.mlp import PerLayerConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import in_layers, linear
from jaxllm.weights.fields import FieldKind, FieldKinds, shown
from jaxllm.weights.names import AnyOf, Pattern, Source, Transform, plus_one

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GELU = "gelu_pytorch_tanh"


# Gemma 1
def gemma1_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`hidden_act: gelu` always meant the approximation by tanh."""
    act = c.get("hidden_act") or GELU
    act = GELU if act == "gelu" else act
    c = DEFAULTS | {"num_key_value_heads": 16, "max_position_embeddings": 8192} | c | {"hidden_act": act}
    scale = math.sqrt(c["hidden_size"])
    return hf_decoder(c, embedding_scale=scale, attention_bias=c.get("attention_bias", False))


NORM: dict[str, Pattern] = {"norm.weight": Source("model.norm.weight", plus_one)}

GEMMA1 = Family(
    name="Gemma", models="Gemma 2B, 7B",
    architectures=("GemmaForCausalLM",), model_types=("gemma",), gguf_architectures=("gemma",),
    from_hf=gemma1_from_hf,
    hf_names=NORM | in_layers(
        "model.layers.*", {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}, plus_one
    ),
)  # fmt: skip


# Gemma 2 and 3, with four norms a layer
def gemma2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Every other layer slides, the first one included; attention logits and output logits are capped."""
    c = DEFAULTS | {"num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 8192} | c
    number = c["num_hidden_layers"]
    kinds = c.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(number)]
    return _later(
        c, sliding_layers(hf_rope(c), c["sliding_window"], kinds),
        attention_softcap=c.get("attn_logit_softcapping", 50.0), logit_softcap=c.get("final_logit_softcapping", 30.0),
    )  # fmt: skip


def gemma3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Five sliding layers to a global one, each kind with a rotary embedding of its own; a norm on queries and keys.

    `max_position_embeddings` is the scaled length already, although the scaling is linear.
    """
    c = DEFAULTS | {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    } | c  # fmt: skip
    if (cap := c.get("attn_logit_softcapping")) is not None:  # transformers and llama.cpp read it and cap nothing
        raise CheckpointError(f"attn_logit_softcapping is {shown(cap)}; accepted is null, since Gemma 3 caps none")
    ropes = c.get("rope_parameters") or {}
    encoder = None
    if c.get("use_bidirectional_attention"):  # EmbeddingGemma, whose window is shared out to both sides
        encoder = EncoderConfig(classifier=ClassifierConfig(pooling="last", activation=None, output_bias=False))
        c = c | {"sliding_window": c["sliding_window"] // 2 + 1 if c["sliding_window"] else None}
    local = {"rope_theta": c.get("rope_local_base_freq", 10_000.0)} | (ropes.get("sliding_attention") or {})
    everywhere = hf_rope(c, theta=1e6, parameters=ropes.get("full_attention") or c.get("rope_scaling"))
    near = hf_rope(c, parameters=local)
    return _later(
        c,
        [
            LayerKind(everywhere if window is None else near, window, sees_images=encoder is None)
            for window in hf_windows(c, period=6)
        ],
        max_position_embeddings=c["max_position_embeddings"], qk_norm="rms",
        logit_softcap=c.get("final_logit_softcapping"), encoder=encoder,
    )  # fmt: skip


def _later(c: dict[str, Any], layers: Iterable[LayerKind], **differences: Any) -> DecoderConfig:
    return hf_decoder(
        c, layers=layers, hidden_act=c.get("hidden_activation") or GELU, post_norms=True,
        embedding_scale=math.sqrt(c["hidden_size"]), attention_scale=c.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=c.get("attention_bias", False), **differences,
    )  # fmt: skip


FOUR_NORMS = NORM | in_layers("model.layers.*", {  # `post_attention_layernorm` really comes after the attention
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
}, plus_one)  # fmt: skip


def _gguf_scalar(layers_of_27b: int) -> Callable[[GgufFile], int]:
    """Files do not say the attention scale; only the 27B models' is not one over the root of their head size."""

    def scalar(file: GgufFile) -> int:
        size, heads = file("embedding_length"), file("attention.head_count")
        return size // heads if file.num_layers == layers_of_27b else file.head_dim

    return scalar


GEMMA2 = Family(
    name="Gemma 2", models="Gemma 2 2B, 9B, 27B",
    architectures=("Gemma2ForCausalLM",), model_types=("gemma2",), gguf_architectures=("gemma2",),
    from_hf=gemma2_from_hf, hf_names=FOUR_NORMS,
    gguf={  # Which layers slide is not stored.
        "query_pre_attn_scalar": _gguf_scalar(46),
        "sliding_window": optional("attention.sliding_window", 4096),
        "attn_logit_softcapping": optional("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": optional("final_logit_softcapping", 30.0),
    },
)  # fmt: skip

EMBEDDING = "gemma-embedding"  # EmbeddingGemma in GGUF

GEMMA3 = Family(
    name="Gemma 3", models="Gemma 3 270M, 1B, 4B, 12B, 27B (text), EmbeddingGemma",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    model_types=("gemma3_text",), wrappers=("gemma3",), gguf_architectures=("gemma3", EMBEDDING),
    from_hf=gemma3_from_hf, hf_names=FOUR_NORMS,
    gguf={  # Which layers slide is not stored.
        "query_pre_attn_scalar": _gguf_scalar(62),
        "sliding_window": nonzero("attention.sliding_window"),
        "attn_logit_softcapping": optional("attn_logit_softcapping", None),
        "final_logit_softcapping": optional("final_logit_softcapping", None),
        "rope_theta": optional("rope.freq_base", 1e6),
        "rope_local_base_freq": optional("rope.freq_base_swa", 10_000.0),
        "rope_parameters": lambda file: {"sliding_attention": {"attn_factor": file("rope.scaling.attn_factor", 1.0)}},
        "use_bidirectional_attention": lambda file: file.architecture == EMBEDDING,
    },
)  # fmt: skip


# Gemma 4, text: E2B and E4B, 12B, 26B-A4B and 31B. Layers with a window and without have heads of different sizes. The
# last layers of E2B and E4B attend to the keys and values of earlier ones, and every layer of these models has an
# embedding of its own for each token.
PERIOD = 6
FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
EVERYWHERE: dict[str, Any] = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
GLOBAL_HEAD_DIM = 512
USUAL_CAP = 30.0  # on the output's logits where a GGUF file does not say it, as llama.cpp has it
GEMMA4_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "max_position_embeddings": 131_072,
}  # fmt: skip
UNIFIED_DEFAULTS = GEMMA4_DEFAULTS | {  # of the 12B model's class in transformers
    "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144,
}  # fmt: skip
GEMMA4_FIELDS: FieldKinds = {
    "num_experts": maybe(COUNT),
    "top_k_experts": maybe(COUNT),
    "moe_intermediate_size": maybe(SIZE),
    "use_bidirectional_attention": FieldKind(
        "null or 'vision', which concerns images alone", lambda value: value is None or value == "vision"
    ),
}
UNROTATED = 1e20  # a GGUF file divides the frequencies of pairs that do not rotate by more than this


def gemma4_from_hf(c: dict[str, Any], defaults: dict[str, Any] = GEMMA4_DEFAULTS) -> DecoderConfig:
    """Windows on five of six layers, unless `layer_types` says otherwise; the last layer never has one."""
    c = defaults | c
    width = c["hidden_size_per_layer_input"]
    return hf_decoder(
        c, layers=_gemma4_layers(c), hidden_act=c.get("hidden_activation") or GELU,
        max_position_embeddings=c["max_position_embeddings"], logit_softcap=c.get("final_logit_softcapping"),
        attention_bias=c.get("attention_bias", False),
        per_layer=PerLayerConfig(width, c.get("vocab_size_per_layer_input", 262_144)) if width else None,
        moe=_experts(c) if c.get("enable_moe_block") else None, layer_scale=True, post_norms=True, qk_norm="rms",
        value_norm=True, attention_scale=1.0, embedding_scale=math.sqrt(c["hidden_size"]),
    )  # fmt: skip


def _experts(c: dict[str, Any]) -> MoEConfig:
    needed = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if missing := [key for key in needed if c.get(key) is None]:
        raise CheckpointError(f"enable_moe_block is true, but {missing[0]} is null; accepted is a number")
    count, top_k, hidden = (c[key] for key in needed)
    return MoEConfig(
        num_experts=count, top_k=top_k, hidden=hidden, renormalize=True, expert_scale=True, beside_dense=True
    )


def _gemma4_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    number, shared = c["num_hidden_layers"], c.get("num_kv_shared_layers") or 0
    if shared >= number:
        raise CheckpointError(f"num_kv_shared_layers is {shared}; accepted are fewer than {number} layers")
    windows = [*hf_windows(c, period=PERIOD)[:-1], None]
    ropes, changes = c.get("rope_parameters") or {}, _per_layer_changes(c, windows)
    layers = []
    for index, window in enumerate(windows):
        kind = FULL if window is None else SLIDING
        head_dim = changes[index].get("head_dim") or c["head_dim"]
        doubled = index >= number - shared and c.get("use_double_wide_mlp")
        given = ropes.get(kind) or (EVERYWHERE if window is None else LOCAL)
        layer = LayerKind(
            _rope(given, head_dim, f"rope_parameters.{kind}."), window, sparse=bool(c.get("enable_moe_block")),
            head_dim=head_dim, num_kv_heads=changes[index].get("num_key_value_heads") or c["num_key_value_heads"],
            keys_are_values=bool(window is None and c.get("attention_k_eq_v")),
            intermediate_size=changes[index].get("intermediate_size") or c["intermediate_size"] * (2 if doubled else 1),
            sees_images=window is not None and c.get("use_bidirectional_attention") == "vision",
        )  # fmt: skip
        layers.append(layer)
    return _sharing(layers, shared)


def _per_layer_changes(c: dict[str, Any], windows: Sequence[int | None]) -> list[dict[str, Any]]:
    """Differences of single layers: newer files list them, older ones state them for layers without a window."""
    given = c.get("per_layer_config")
    if given is None:
        full = {"head_dim": c.get("global_head_dim", GLOBAL_HEAD_DIM)}
        if c.get("attention_k_eq_v"):
            full["num_key_value_heads"] = c.get("num_global_key_value_heads")
        return [full if window is None else {} for window in windows]
    accepted: FieldKinds = {"head_dim": SIZE, "num_key_value_heads": COUNT, "intermediate_size": SIZE}
    changes: list[dict[str, Any]] = [{} for _ in windows]
    for key, change in given.items():
        index = int(key) if key.isdecimal() and len(key) < 5 else len(windows)
        fits = isinstance(change, dict) and all(
            name in accepted and accepted[name].fits(change[name]) for name in change
        )
        if index >= len(windows) or not fits:
            raise CheckpointError(
                f"per_layer_config.{shown(key)} is {shown(change)}; accepted is, for a layer's number, an object with "
                f"{' and '.join(accepted)}"
            )
        changes[index] = change
    return changes


def _rope(given: dict[str, Any], head_dim: int, prefix: str) -> RopeConfig:
    """Heads are paired over their whole size, also where only the first pairs rotate."""
    kind, factor = given.get("rope_type") or "default", float(given.get("factor") or 1.0)
    if kind not in ("default", "proportional"):
        raise CheckpointError(f"{prefix}rope_type is {shown(kind)}; accepted are default and proportional")
    theta, sharper = float(given.get("rope_theta") or LOCAL["rope_theta"]), given.get("attn_factor", 1.0)
    if kind == "default":
        return RopeConfig(dim=head_dim, theta=theta, attention_factor=sharper)
    pairs = int((given.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    return RopeConfig(dim=head_dim, theta=theta, kind=kind, factor=factor, pairs=pairs, attention_factor=sharper)


def _sharing(layers: Sequence[LayerKind], shared: int) -> tuple[LayerKind, ...]:
    """The last `shared` layers attend to what the last one before them keeps that has a window or not, as they do."""
    own = list(layers[: len(layers) - shared])
    for layer in layers[len(own) :]:
        owner = next((i for i in reversed(range(len(layers) - shared)) if own[i].window == layer.window), None)
        if owner is None:
            raise CheckpointError(
                f"the last {shared} layers share keys and values, but no layer before them has "
                f"{'no window' if layer.window is None else 'a window'}, as some of them have"
            )
        own.append(replace(layer, shares_kv_of=owner, keys_are_values=False))
    return tuple(own)


def gemma4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Four norms a layer, or seven; what a layer is told of its own stands beside the attention and the MLP."""
    layer = "model.layers.*"
    names: dict[str, Pattern] = {
        "layers.*.scale": f"{layer}.layer_scalar",
        "per_layer.embed.weight": "model.embed_tokens_per_layer.weight",
        "per_layer.projection.weight": "model.per_layer_model_projection.weight",
        "per_layer.norm.weight": "model.per_layer_projection_norm.weight",
        **in_layers(layer, {
            "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm", "per_layer.gate": "per_layer_input_gate",
            "per_layer.projection": "per_layer_projection", "per_layer.norm": "post_per_layer_input_norm",
        }),
        **_attention_names(config, lambda index, part: f"model.layers.{index}.self_attn.{part}_proj"),
    }  # fmt: skip
    if config.moe is not None:
        names |= in_layers(layer, {
            "mlp.dense.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.dense.down": "mlp.down_proj",
            "mlp.dense_post_norm": "post_feedforward_layernorm_1", "mlp.moe_norm": "pre_feedforward_layernorm_2",
            "mlp.moe_post_norm": "post_feedforward_layernorm_2", "mlp.moe.router": "router.proj",
        }) | {
            "layers.*.mlp.moe.router.norm.weight": Source(f"{layer}.router.scale", _shrunk(config.hidden_size)),
            "layers.*.mlp.moe.router.expert_scale": f"{layer}.router.per_expert_scale",
            "layers.*.mlp.moe.experts.gate_up.weight": f"{layer}.experts.gate_up_proj",
            "layers.*.mlp.moe.experts.down.weight": f"{layer}.experts.down_proj",
        }  # fmt: skip
    return names


def _attention_names(config: DecoderConfig, tensor: Callable[[int, str], str]) -> dict[str, Pattern]:
    names: dict[str, Pattern] = {}
    for index, layer in enumerate(config.layers):
        parts = "q" if layer.shares_kv_of is not None else "qk" if layer.keys_are_values else "qkv"
        names |= linear(f"layers.{index}.attention.qkv", *(tensor(index, part) for part in parts))
    return names


def _shrunk(size: int) -> Transform:
    """The router's factor on each channel, which is divided by the root of their number, as a norm's weight."""

    def transform(weight: np.ndarray) -> np.ndarray:
        return weight.astype(np.float32) * np.float32(size**-0.5)

    return transform


def gemma4_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    names: dict[str, Pattern] = {
        "layers.*.scale": "blk.*.layer_output_scale.weight",
        "per_layer.embed.weight": "per_layer_token_embd.weight",
        "per_layer.projection.weight": "per_layer_model_proj.weight",
        "per_layer.norm.weight": "per_layer_proj_norm.weight",
        **in_layers(
            "blk.*", {"per_layer.gate": "inp_gate", "per_layer.projection": "proj", "per_layer.norm": "post_norm"}
        ),
        **_attention_names(config, lambda index, part: f"blk.{index}.attn_{part}"),
    }
    if config.moe is not None:
        names |= in_layers("blk.*", {
            "mlp.dense.gate_up": ("ffn_gate", "ffn_up"), "mlp.dense.down": "ffn_down",
            "mlp.dense_post_norm": "post_ffw_norm_1", "mlp.moe_norm": "pre_ffw_norm_2",
            "mlp.moe_post_norm": "post_ffw_norm_2", "mlp.moe.router": "ffn_gate_inp",
            "mlp.moe.experts.down": "ffn_down_exps",
        }) | {
            "layers.*.mlp.moe.router.norm.weight": Source("blk.*.ffn_gate_inp.scale", _shrunk(config.hidden_size)),
            "layers.*.mlp.moe.router.expert_scale": "blk.*.ffn_down_exps.scale",
            "layers.*.mlp.moe.experts.gate_up.weight": AnyOf(
                "blk.*.ffn_gate_up_exps.weight", ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")
            ),
        }  # fmt: skip
    return names


def _gguf_per_layer(file: GgufFile) -> dict[str, Any]:
    kv_heads, sizes = file.by_layer("attention.head_count_kv"), file.by_layer("feed_forward_length")
    heads = {FULL: file.head_dim, SLIDING: file("attention.key_length_swa")}
    return {
        str(i): {"head_dim": heads[kind], "num_key_value_heads": kv_heads[i], "intermediate_size": sizes[i]}
        for i, kind in enumerate(layer_types(PERIOD)(file))
    }


def _gguf_kv_heads(file: GgufFile) -> int:
    kinds = layer_types(PERIOD)(file)
    return file.by_layer("attention.head_count_kv")[kinds.index(SLIDING) if SLIDING in kinds else 0]


def _gguf_keys_are_values(file: GgufFile) -> bool:
    """A layer without a tensor of values has keys for them, unless it shares those of another."""
    own = range(file.num_layers - file("attention.shared_kv_layers", 0))
    return not all(file.has(f"blk.{i}.attn_v.weight") for i in own)


def _gguf_ropes(file: GgufFile) -> dict[str, Any]:
    """The file has a divisor for each pair of channels: one, or a huge one for those that do not rotate."""
    theta, given = file("rope.freq_base", EVERYWHERE["rope_theta"]), rope_scaling(file)
    sizes = {"rope.dimension_count": file.head_dim, "rope.dimension_count_swa": file("attention.key_length_swa")}
    for key, size in sizes.items():
        if file(key, 0) not in (0, size):
            raise CheckpointError(f"{key} is {file(key)}; accepted is a head's {size}")
    divisors = given.pop("divisors", [1.0] * (file.head_dim // 2))
    pairs = sum(divisor < UNROTATED for divisor in divisors)
    if any(divisor != 1 for divisor in divisors[:pairs]) or given["rope_type"] not in ("default", "linear"):
        raise CheckpointError("tensor 'rope_freqs.weight' has factors that are neither 1 nor huge; accepted are those")
    part = Fraction(2 * pairs, file.head_dim)
    everywhere = given | {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}
    return {FULL: everywhere, SLIDING: {"rope_theta": file("rope.freq_base_swa", LOCAL["rope_theta"])}}


GEMMA4 = Family(
    name="Gemma 4", models="Gemma 4 E2B, E4B, 26B-A4B, 31B (text)",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_types=("gemma4_text",), wrappers=("gemma4",), fields=GEMMA4_FIELDS,
    from_hf=gemma4_from_hf, hf_names=gemma4_hf_names, gguf_architectures=("gemma4",), gguf_names=gemma4_gguf_names,
    gguf={
        "hidden_size_per_layer_input": optional("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": lambda file: (
            file.rows("per_layer_token_embd.weight") if file("embedding_length_per_layer_input", 0) else ABSENT
        ),
        "head_dim": "attention.key_length_swa",
        "num_key_value_heads": _gguf_kv_heads,
        "intermediate_size": lambda file: file.by_layer("feed_forward_length")[0],
        "per_layer_config": _gguf_per_layer,
        "num_kv_shared_layers": optional("attention.shared_kv_layers", 0),
        "attention_k_eq_v": _gguf_keys_are_values,
        "sliding_window": nonzero("attention.sliding_window"),
        "layer_types": layer_types(PERIOD),
        "rope_parameters": _gguf_ropes,
        "rope_scaling": ABSENT,
        "partial_rotary_factor": ABSENT,
        "final_logit_softcapping": optional("final_logit_softcapping", USUAL_CAP),
        "enable_moe_block": lambda file: bool(file("expert_count", 0)),
        **with_experts({"top_k_experts": "expert_used_count"}),
    },
)  # fmt: skip

UNIFIED = Family(
    name="Gemma 4 unified", models="Gemma 4 12B (text)",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    model_types=("gemma4_unified_text",), wrappers=("gemma4_unified",), fields=GEMMA4_FIELDS,
    from_hf=partial(gemma4_from_hf, defaults=UNIFIED_DEFAULTS), hf_names=gemma4_hf_names,
    gguf_architectures=("gemma4",), gguf=None,
)  # fmt: skip
