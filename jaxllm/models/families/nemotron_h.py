"""Nemotron-H and Nemotron 3: layers that are one block each: state-space, attention without positions, MLP, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek
from jaxllm.models.families.deepseek import sigmoid_experts
from jaxllm.models.families.mamba import (
    check_activation,
    gguf_ssd_head_dim,
    gguf_ssd_names,
    hf_ssd_names,
    hf_time_step_limits,
)
from jaxllm.models.family import Family, hf_fields, hf_linear
from jaxllm.models.gguf import ABSENT, GgufFile, Table, optional, with_experts
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf_fields import LAYERS
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.recurrent import SSDConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern, Source

MLP, EXPERTS = LayerKind(None, mixer=None), LayerKind(None, mixer=None, sparse=True)
STATES, ATTENTION = LayerKind(None, mixer="ssd", mlp=False), LayerKind(None, mlp=False)
KINDS = {"mamba": STATES, "attention": ATTENTION, "mlp": MLP, "moe": EXPERTS}
KINDS |= {"linear_attention": STATES, "full_attention": ATTENTION}
LETTERS = {"M": STATES, "*": ATTENTION, "-": MLP, "E": EXPERTS}
LAYER_TYPES = tuple(KINDS)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "intermediate_size": 21_504, "mlp_hidden_act": "relu2", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
UNREAD = {"attention_bias": (None, False), "sliding_window": (None,)}
"""Keys that transformers has, and that its layers do not look at."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The number of layers is that of the pattern, or of the list that has its place in newer files.

    A step's length is kept within `time_step_limit`, as in NVIDIA's own code. transformers 5.24 keeps it above
    `time_step_min` too, in prompts and not in answers.
    """
    c = DEFAULTS | {"head_dim": c.get("attention_head_dim") or 128} | c
    check_activation(c, "mamba_hidden_act")
    for name, accepted in UNREAD.items():
        if c.get(name) not in accepted:
            raise CheckpointError(f"{name} is {shown(c[name])}; accepted is {' or '.join(map(_json, accepted))}")
    layers = _layers(c)
    sparse = any(layer.sparse for layer in layers)
    if sparse and c.get("mlp_bias"):
        raise CheckpointError("mlp_bias is True; accepted is false in a model with experts")
    return DecoderConfig(
        **hf_fields(
            c,
            layers=layers,
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            hidden_act=c["mlp_hidden_act"],
            gated_mlp=False,
            mlp_bias=c.get("mlp_bias"),
            moe=_moe(c) if sparse else None,
            ssd=_ssd(c) if STATES in layers else None,
        )
    )


def _json(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    """`layers_block_type`, also called `layer_types`, goes before the pattern of letters."""
    kinds, pattern = c.get("layers_block_type") or c.get("layer_types"), c.get("hybrid_override_pattern")
    if kinds:
        return tuple(KINDS[kind] for kind in kinds)
    if not pattern:
        return STATES, EXPERTS, ATTENTION, MLP
    if not LAYERS.fits(len(pattern)) or set(pattern) - set(LETTERS):
        raise CheckpointError(
            f"hybrid_override_pattern is {shown(pattern)}; accepted is a letter for each layer, of {' '.join(LETTERS)}"
        )
    return tuple(LETTERS[letter] for letter in pattern)


def _moe(c: dict[str, Any]) -> MoEConfig:
    """DeepSeek V3's router, over experts without gates, which may work on a projection."""
    shared = c["moe_shared_expert_intermediate_size"]
    return replace(sigmoid_experts(c), shared_hidden=shared, gated=False, latent=c.get("moe_latent_size") or 0)


def _ssd(c: dict[str, Any]) -> SSDConfig:
    bias = bool(c.get("use_bias"))
    return SSDConfig(
        heads=c["mamba_num_heads"],
        head_dim=c["mamba_head_dim"],
        state_size=c["ssm_state_size"],
        groups=c["n_groups"],
        kernel=c["conv_kernel"],
        conv_bias=bool(c["use_conv_bias"]),
        bias=bias,
        output_bias=bias,
        **hf_time_step_limits(c),
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """As in published checkpoints, or as transformers 5 calls them."""
    first, second = _names(config, "backbone"), _names(config, "model")
    return {path: AnyOf(*_options(first[path]), *_options(second[path])) for path in first}


def _options(pattern: Pattern) -> tuple[Any, ...]:
    return pattern.options if isinstance(pattern, AnyOf) else (pattern,)


def _names(config: DecoderConfig, model: str) -> dict[str, Pattern]:
    layer, block = f"{model}.layers.*", f"{model}.layers.*.mixer"
    names: dict[str, Pattern] = {
        "embed.weight": f"{model}.embeddings.weight",
        "norm.weight": f"{model}.norm_f.weight",
        "layers.*.attention_norm.weight": f"{layer}.norm.weight",
        "layers.*.mlp_norm.weight": f"{layer}.norm.weight",
        **hf_linear("layers.*.attention.qkv", *(f"{block}.{p}_proj" for p in "qkv")),
        **hf_linear("layers.*.attention.output", f"{block}.o_proj"),
        **hf_linear("layers.*.mlp.up", f"{block}.up_proj"),
        **hf_linear("layers.*.mlp.down", f"{block}.down_proj"),
        **hf_ssd_names(config, block),
    }
    if config.moe is None:
        return names
    count = config.moe.num_experts
    for part in ("up", "down"):
        each = Source(f"{block}.experts.{{}}.{part}_proj.weight", stack=count)
        names[f"layers.*.mlp.experts.{part}.weight"] = AnyOf(each, f"{block}.experts.{part}_proj")
        names[f"layers.*.mlp.shared.{part}.weight"] = f"{block}.shared_experts.{part}_proj.weight"
    return names | {
        "layers.*.mlp.router.weight": f"{block}.gate.weight",
        "layers.*.mlp.router.correction_bias": f"{block}.gate.e_score_correction_bias",
        "layers.*.mlp.latent_down.weight": f"{block}.fc1_latent_proj.weight",
        "layers.*.mlp.latent_up.weight": f"{block}.fc2_latent_proj.weight",
    }


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Each layer has one norm; rows of queries and keys are moved, though nothing rotates them."""
    return (
        permuted_names(config)
        | gguf_ssd_names(config)
        | {
            "layers.*.mlp_norm.weight": "blk.*.attn_norm.weight",
            "layers.*.mlp.latent_down.weight": "blk.*.ffn_latent_down.weight",
            "layers.*.mlp.latent_up.weight": "blk.*.ffn_latent_up.weight",
        }
    )


def _gguf_kinds(file: GgufFile) -> list[str]:
    """A layer with KV heads attends, one with an MLP's size has that or experts, and the others have states."""
    kv_heads, sizes = file.by_layer("attention.head_count_kv"), file.by_layer("feed_forward_length")
    experts = [file.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(file.num_layers)]
    return [
        "attention" if heads else "mamba" if not size else "moe" if sparse else "mlp"
        for heads, size, sparse in zip(kv_heads, sizes, experts, strict=True)
    ]


def _one_of_all(key: str, values: list[int]) -> int | None:
    """The one value that a key has in the layers where it is not 0; None where it is 0 in all."""
    different = sorted(set(values) - {0})
    if len(different) > 1:
        raise CheckpointError(f"{key} is {shown(different)} in layers that have one; accepted is the same in each")
    return different[0] if different else None


def _gguf_mlp_size(file: GgufFile) -> int:
    sizes = zip(file.by_layer("feed_forward_length"), _gguf_kinds(file), strict=True)
    dense = _one_of_all("feed_forward_length", [size for size, kind in sizes if kind == "mlp"])
    return dense or file("expert_feed_forward_length", 0)


def _gguf_kv_heads(file: GgufFile) -> int:
    key = "attention.head_count_kv"
    return _one_of_all(key, file.by_layer(key)) or file("attention.head_count")


GGUF: Table = {
    "layers_block_type": _gguf_kinds,
    "intermediate_size": _gguf_mlp_size,
    "num_key_value_heads": _gguf_kv_heads,
    "mamba_num_heads": "ssm.time_step_rank",
    "mamba_head_dim": gguf_ssd_head_dim,
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    **with_experts(
        deepseek.ROUTED_GGUF
        | {
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "n_shared_experts": ABSENT,
            "moe_latent_size": optional("moe_latent_size", 0),
        }
    ),
}


FAMILY = Family(
    name="Nemotron-H",
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
    architectures=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    layer_types=LAYER_TYPES,
    from_hf=from_hf,
    gguf_architectures=("nemotron_h", "nemotron_h_moe"),
    gguf=GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
