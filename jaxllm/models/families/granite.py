"""Granite 3 and 4."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.mamba import (
    check_activation,
    check_sizes,
    gguf_ssd_head_dim,
    gguf_ssd_names,
    hf_ssd_names,
    hf_time_step_limits,
)
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, attending_kv_heads, nonzero, optional
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.ssd import SSDConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern

# Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits


def hf_scales(c: dict[str, Any]) -> dict[str, float]:
    """DecoderConfig's factors. Logits are divided by `logits_scaling`."""
    return {
        "embedding_scale": float(c.get("embedding_multiplier", 1.0)),
        "attention_scale": float(c.get("attention_multiplier", 1.0)),
        "residual_scale": float(c.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / c.get("logits_scaling", 1.0),
    }


GRANITE_GGUF: Table = {
    "embedding_multiplier": nonzero("embedding_scale", 1.0),
    "attention_multiplier": lambda file: file("attention.scale", 0) or file.head_dim**-0.5,
    "residual_multiplier": nonzero("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}
"""A factor of 0 is none."""


def granite_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Biases on attention are on all of its products."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False), **hf_scales(c))
    )


GRANITE = Family(
    name="Granite 3",
    models="Granite 3.0, 3.1, 3.2, 3.3",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=granite_from_hf,
    gguf_architectures=("granite",),
    gguf=GRANITE_GGUF,
    gguf_names=permuted_names,
)


# Granite 4: state-space layers, and attention in every few layers, mostly without positions; dense, or with experts

GRANITE4_LAYER_TYPES = ("mamba", "attention", "linear_attention", "full_attention")
"""As checkpoints call them, and as transformers does."""
ATTENTION = ("attention", "full_attention")
GRANITE4_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
}


def granite4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A model without experts has the shared MLP alone."""
    c = GRANITE4_DEFAULTS | c
    kinds = c.get("layer_types") or ["mamba"] * c["num_hidden_layers"]
    positions = c.get("position_embedding_type")
    if positions not in ("rope", "nope", None):
        raise CheckpointError(f"position_embedding_type is {shown(positions)}; accepted is one of rope, nope or null")
    rope = hf_rope(c, hf_head_dim(c)) if positions == "rope" else None
    sparse = bool(c["num_local_experts"])
    attending, states = LayerKind(rope, sparse=sparse), LayerKind(None, sparse=sparse, mixer="ssd")
    layers = tuple(attending if kind in ATTENTION else states for kind in kinds)
    bias = bool(c.get("attention_bias"))
    dense = {"intermediate_size": c["shared_intermediate_size"]}
    return DecoderConfig(
        **hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **hf_scales(c), **dense),
        moe=_moe(c) if sparse else None,
        ssd=_ssd(c) if states in layers else None,
    )


def _moe(c: dict[str, Any]) -> MoEConfig:
    """A softmax over the logits of the chosen experts."""
    return MoEConfig(
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        hidden=c["intermediate_size"],
        renormalize=True,
        shared_hidden=c["shared_intermediate_size"],
    )


def _ssd(c: dict[str, Any]) -> SSDConfig:
    check_activation(c, "hidden_act")
    inner, heads = c["mamba_expand"] * c["hidden_size"], c["mamba_n_heads"]
    head_dim = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    check_sizes("mamba_d_head", head_dim, heads, inner)
    return SSDConfig(
        heads=heads,
        head_dim=head_dim,
        state_size=c.get("mamba_d_state", 256),
        groups=c.get("mamba_n_groups", 1),
        kernel=c.get("mamba_d_conv", 4),
        conv_bias=bool(c.get("mamba_conv_bias", True)),
        bias=bool(c.get("mamba_proj_bias", False)),
        output_bias=bool(c.get("mamba_proj_bias", False)),
        **hf_time_step_limits(c),
    )


def granite4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Gate and up are one tensor; experts are stacked, under the names of the checkpoints or of transformers 5."""
    layer, experts = "model.layers.*", "model.layers.*.block_sparse_moe"
    shared = "mlp.shared" if config.moe else "mlp"
    return {
        **hf_ssd_names(config, f"{layer}.mamba"),
        f"layers.*.{shared}.gate_up.weight": f"{layer}.shared_mlp.input_linear.weight",
        f"layers.*.{shared}.down.weight": f"{layer}.shared_mlp.output_linear.weight",
        "layers.*.mlp.router.weight": AnyOf(f"{experts}.router.layer.weight", f"{experts}.router.weight"),
        "layers.*.mlp.experts.gate_up.weight": AnyOf(
            f"{experts}.input_linear.weight", f"{experts}.experts.gate_up_proj"
        ),
        "layers.*.mlp.experts.down.weight": AnyOf(f"{experts}.output_linear.weight", f"{experts}.experts.down_proj"),
    }


def granite4_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Rows of queries and keys are moved, though mostly nothing rotates them."""
    return permuted_names(config) | gguf_ssd_names(config)


GRANITE4_GGUF: Table = {
    **GRANITE_GGUF,
    "layer_types": lambda file: ["attention" if n else "mamba" for n in file.by_layer("attention.head_count_kv")],
    "num_key_value_heads": attending_kv_heads,
    "position_embedding_type": lambda file: "rope" if file("rope.scaling.finetuned", True) else "nope",
    "num_local_experts": optional("expert_count", 0),
    "num_experts_per_tok": optional("expert_used_count", 0),
    "shared_intermediate_size": lambda file: file(
        "expert_shared_feed_forward_length" if file("expert_count", 0) else "feed_forward_length"
    ),
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": gguf_ssd_head_dim,
    "mamba_expand": lambda file: file("ssm.inner_size") // file("embedding_length"),
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
"""A layer without KV heads is a state-space layer.

Rotary embeddings are there unless a key says that they are not, which llama.cpp has for another purpose.
"""


GRANITE4 = Family(
    name="Granite 4",
    models="Granite 4.0 (H Micro, Tiny, Small; Micro; 1B, 350M)",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    layer_types=GRANITE4_LAYER_TYPES,
    from_hf=granite4_from_hf,
    gguf_architectures=("granitehybrid",),
    gguf=GRANITE4_GGUF,
    hf_names=granite4_hf_names,
    gguf_names=granite4_gguf_names,
)
