"""Gemma 4, text: E2B and E4B, 12B, 26B-A4B and 31B.

Layers with a window and without have heads of different sizes. The last layers of E2B and E4B attend to the keys and
values of earlier ones, and every layer of these models has an embedding of its own for each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_fields, hf_windows
from jaxllm.models.gguf import (
    ABSENT,
    GGUF_EXPERTS,
    GgufFile,
    Table,
    layer_types,
    nonzero,
    optional,
    rope_scaling,
    with_experts,
)
from jaxllm.models.hf_fields import COUNT, SIZE, maybe
from jaxllm.models.layers.mlp import PerLayerConfig
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.fields import FieldKind, FieldKinds, shown
from jaxllm.weights.names import AnyOf, Pattern, Source, Transform

GELU = "gelu_pytorch_tanh"
PERIOD = 6
FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
EVERYWHERE: dict[str, Any] = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
GLOBAL_HEAD_DIM = 512
USUAL_CAP = 30.0
"""On the output's logits where a GGUF file does not say it, as llama.cpp has it."""
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "max_position_embeddings": 131_072,
}  # fmt: skip
UNIFIED_DEFAULTS = DEFAULTS | {
    "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144,
}  # fmt: skip
FIELDS: FieldKinds = {
    "num_experts": maybe(COUNT),
    "top_k_experts": maybe(COUNT),
    "moe_intermediate_size": maybe(SIZE),
    "use_bidirectional_attention": FieldKind(
        "null or 'vision', which concerns images alone", lambda value: value is None or value == "vision"
    ),
}
UNROTATED = 1e20
"""A GGUF file divides the frequencies of pairs that do not rotate by more than this."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Windows on five of six layers, unless `layer_types` says otherwise; the last layer never has one."""
    return _from_hf(DEFAULTS | c)


def unified_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 12B model, whose class in transformers has other defaults."""
    return _from_hf(UNIFIED_DEFAULTS | c)


def _from_hf(c: dict[str, Any]) -> DecoderConfig:
    bias, width = c.get("attention_bias", False), c["hidden_size_per_layer_input"]
    return DecoderConfig(
        **hf_fields(
            c,
            layers=_hf_layers(c),
            hidden_act=c.get("hidden_activation") or GELU,
            max_position_embeddings=c["max_position_embeddings"],
            logit_softcap=c.get("final_logit_softcapping"),
            qkv_bias=bias,
            output_bias=bias,
            per_layer=PerLayerConfig(width, c.get("vocab_size_per_layer_input", 262_144)) if width else None,
            moe=_experts(c) if c.get("enable_moe_block") else None,
            layer_scale=True,
            post_norms=True,
            qk_norm="rms",
            value_norm=True,
            attention_scale=1.0,
            embedding_scale=math.sqrt(c["hidden_size"]),
        )
    )


def _hf_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    number, shared = c["num_hidden_layers"], c.get("num_kv_shared_layers") or 0
    if shared >= number:
        raise CheckpointError(f"num_kv_shared_layers is {shared}; accepted are fewer than {number} layers")
    windows = [*hf_windows(c, period=PERIOD)[:-1], None]
    ropes, changes = c.get("rope_parameters") or {}, _per_layer_changes(c)
    layers = []
    for index, window in enumerate(windows):
        kind = FULL if window is None else SLIDING
        head_dim = changes[index].get("head_dim") or c["head_dim"]
        alike = window is None and c.get("attention_k_eq_v")
        doubled = index >= number - shared and c.get("use_double_wide_mlp")
        given = ropes.get(kind) or (EVERYWHERE if window is None else LOCAL)
        layer = LayerKind(
            _rope(given, head_dim, f"rope_parameters.{kind}."),
            window,
            sparse=bool(c.get("enable_moe_block")),
            head_dim=head_dim,
            num_kv_heads=changes[index].get("num_key_value_heads") or c["num_key_value_heads"],
            keys_are_values=bool(alike),
            intermediate_size=changes[index].get("intermediate_size") or c["intermediate_size"] * (2 if doubled else 1),
        )
        layers.append(layer)
    return _sharing(layers, shared)


def _per_layer_changes(c: dict[str, Any]) -> list[dict[str, Any]]:
    """What single layers have otherwise: as newer files list it, or as older ones say it of layers without a window."""
    number = c["num_hidden_layers"]
    given = c.get("per_layer_config")
    if given is None:
        full = {"head_dim": c.get("global_head_dim", GLOBAL_HEAD_DIM)}
        if c.get("attention_k_eq_v"):
            full["num_key_value_heads"] = c.get("num_global_key_value_heads")
        windows = [*hf_windows(c, period=PERIOD)[:-1], None]
        return [full if window is None else {} for window in windows]
    accepted: FieldKinds = {"head_dim": SIZE, "num_key_value_heads": COUNT, "intermediate_size": SIZE}
    changes: list[dict[str, Any]] = [{} for _ in range(number)]
    for key, change in given.items():
        index = int(key) if key.isdecimal() and len(key) < 5 else number
        fits = isinstance(change, dict) and all(
            name in accepted and accepted[name].fits(change[name]) for name in change
        )
        if index >= number or not fits:
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


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Four norms a layer, or seven; what a layer is told of its own stands beside the attention and the MLP."""
    layer = "model.layers.*"
    names: dict[str, Pattern] = {
        "layers.*.attention_post_norm.weight": f"{layer}.post_attention_layernorm.weight",
        "layers.*.mlp_norm.weight": f"{layer}.pre_feedforward_layernorm.weight",
        "layers.*.mlp_post_norm.weight": f"{layer}.post_feedforward_layernorm.weight",
        "layers.*.scale": f"{layer}.layer_scalar",
        "per_layer.embed.weight": "model.embed_tokens_per_layer.weight",
        "per_layer.projection.weight": "model.per_layer_model_projection.weight",
        "per_layer.norm.weight": "model.per_layer_projection_norm.weight",
        "layers.*.per_layer.gate.weight": f"{layer}.per_layer_input_gate.weight",
        "layers.*.per_layer.projection.weight": f"{layer}.per_layer_projection.weight",
        "layers.*.per_layer.norm.weight": f"{layer}.post_per_layer_input_norm.weight",
        **_attention_names(config, lambda index, part: f"model.layers.{index}.self_attn.{part}_proj"),
    }
    if config.moe is not None:
        names |= {
            **_dense_names((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"),
            "layers.*.mlp.dense_post_norm.weight": f"{layer}.post_feedforward_layernorm_1.weight",
            "layers.*.mlp.moe_norm.weight": f"{layer}.pre_feedforward_layernorm_2.weight",
            "layers.*.mlp.moe_post_norm.weight": f"{layer}.post_feedforward_layernorm_2.weight",
            "layers.*.mlp.moe.router.weight": f"{layer}.router.proj.weight",
            "layers.*.mlp.moe.router.norm.weight": Source(f"{layer}.router.scale", _shrunk(config.hidden_size)),
            "layers.*.mlp.moe.router.expert_scale": f"{layer}.router.per_expert_scale",
            "layers.*.mlp.moe.experts.gate_up.weight": f"{layer}.experts.gate_up_proj",
            "layers.*.mlp.moe.experts.down.weight": f"{layer}.experts.down_proj",
        }
    return names


def _attention_names(config: DecoderConfig, tensor: Any) -> dict[str, Pattern]:
    """Layers differ in what they have of queries, keys and values."""
    names: dict[str, Pattern] = {}
    for index, layer in enumerate(config.layers):
        parts = "q" if layer.shares_kv_of is not None else "qk" if layer.keys_are_values else "qkv"
        for kind in ("weight", "bias"):
            names[f"layers.{index}.attention.qkv.{kind}"] = tuple(f"{tensor(index, part)}.{kind}" for part in parts)
    return names


def _dense_names(gate_up: tuple[str, str], down: str) -> dict[str, Pattern]:
    return {
        "layers.*.mlp.dense.gate_up.weight": tuple(f"{name}.weight" for name in gate_up),
        "layers.*.mlp.dense.down.weight": f"{down}.weight",
    }


def _shrunk(size: int) -> Transform:
    """The router's factor on each channel, which is divided by the root of their number, as a norm's weight."""

    def transform(weight: np.ndarray) -> np.ndarray:
        return weight.astype(np.float32) * np.float32(size**-0.5)

    return transform


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Gate and up of the experts are one tensor, or two."""
    names: dict[str, Pattern] = {
        "layers.*.scale": "blk.*.layer_output_scale.weight",
        "per_layer.embed.weight": "per_layer_token_embd.weight",
        "per_layer.projection.weight": "per_layer_model_proj.weight",
        "per_layer.norm.weight": "per_layer_proj_norm.weight",
        "layers.*.per_layer.gate.weight": "blk.*.inp_gate.weight",
        "layers.*.per_layer.projection.weight": "blk.*.proj.weight",
        "layers.*.per_layer.norm.weight": "blk.*.post_norm.weight",
        **_attention_names(config, lambda index, part: f"blk.{index}.attn_{part}"),
    }
    if config.moe is not None:
        names |= {
            **_dense_names(("blk.*.ffn_gate", "blk.*.ffn_up"), "blk.*.ffn_down"),
            "layers.*.mlp.dense_post_norm.weight": "blk.*.post_ffw_norm_1.weight",
            "layers.*.mlp.moe_norm.weight": "blk.*.pre_ffw_norm_2.weight",
            "layers.*.mlp.moe_post_norm.weight": "blk.*.post_ffw_norm_2.weight",
            "layers.*.mlp.moe.router.weight": "blk.*.ffn_gate_inp.weight",
            "layers.*.mlp.moe.router.norm.weight": Source("blk.*.ffn_gate_inp.scale", _shrunk(config.hidden_size)),
            "layers.*.mlp.moe.router.expert_scale": "blk.*.ffn_down_exps.scale",
            "layers.*.mlp.moe.experts.gate_up.weight": AnyOf(
                "blk.*.ffn_gate_up_exps.weight", ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")
            ),
            "layers.*.mlp.moe.experts.down.weight": "blk.*.ffn_down_exps.weight",
        }
    return names


def _experts(c: dict[str, Any]) -> MoEConfig:
    needed = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if missing := [key for key in needed if c.get(key) is None]:
        raise CheckpointError(f"enable_moe_block is true, but {missing[0]} is null; accepted is a number")
    count, top_k, hidden = (c[key] for key in needed)
    return MoEConfig(
        num_experts=count, top_k=top_k, hidden=hidden, renormalize=True, expert_scale=True, beside_dense=True
    )


def _gguf_per_layer(file: GgufFile) -> dict[str, Any]:
    kv_heads, sizes = file.by_layer("attention.head_count_kv"), file.by_layer("feed_forward_length")
    heads = {FULL: file.head_dim, SLIDING: file("attention.key_length_swa")}
    kinds = enumerate(layer_types(PERIOD)(file))
    return {
        str(i): {"head_dim": heads[kind], "num_key_value_heads": kv_heads[i], "intermediate_size": sizes[i]}
        for i, kind in kinds
    }


def _gguf_kv_heads(file: GgufFile) -> int:
    """Those of a layer with a window, if there is one."""
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


GGUF: Table = {
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
    **with_experts({**GGUF_EXPERTS, "top_k_experts": "expert_used_count"}),
}


GEMMA4 = Family(
    name="Gemma 4",
    models="Gemma 4 E2B, E4B, 26B-A4B, 31B (text)",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    model_types=("gemma4_text",),
    wrappers=("gemma4",),
    fields=FIELDS,
    from_hf=from_hf,
    gguf_architectures=("gemma4",),
    gguf=GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)

UNIFIED = Family(
    name="Gemma 4 unified",
    models="Gemma 4 12B (text)",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    model_types=("gemma4_unified_text",),
    wrappers=("gemma4_unified",),
    fields=FIELDS,
    from_hf=unified_from_hf,
    hf_names=hf_names,
    gguf_architectures=("gemma4",),
)
