"""Falcon-H1: attention and a state-space layer side by side in each layer, and a factor on nearly everything."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.layers.ssd import NormPlace, SSDConfig
from jaxllm.models.state_space import (
    check_activation,
    check_sizes,
    gguf_ssd_head_dim,
    gguf_ssd_names,
    hf_ssd_names,
    hf_time_step_limits,
)
from jaxllm.weights.names import AnyOf, Pattern

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2,
}  # fmt: skip
FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Factors on queries and keys are one on the logits; those on the inputs of products are on their outputs."""
    c = DEFAULTS | c
    factor = {name: float(c.get(name) or 1.0) for name in FACTORS}
    gate, down = c.get("mlp_multipliers") or (1.0, 1.0)
    into, bias = factor["attention_in_multiplier"], bool(c.get("attention_bias"))
    _check_bias("attention_in_multiplier", into, "attention_bias", bias)
    head_dim = hf_head_dim(c)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=_layers(hf_rope(c, head_dim), c["num_hidden_layers"]),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=c.get("mlp_bias"),
            ssd=_ssd(c, factor["ssm_in_multiplier"], factor["ssm_out_multiplier"]),
            embedding_scale=factor["embedding_multiplier"],
            logit_scale=factor["lm_head_multiplier"],
            attention_scale=head_dim**-0.5 * into * into * factor["key_multiplier"],
            attention_out_scale=into * factor["attention_out_multiplier"],
            mlp_gate_scale=float(gate),
            mlp_out_scale=float(down),
        )
    )


def _check_bias(factor: str, value: float, flag: str, bias: bool) -> None:
    """A factor on the input of a product with a bias is not one on its output."""
    if bias and value != 1.0:
        raise CheckpointError(f"{factor} is {value}; accepted is 1 where {flag} is true")


def _ssd(c: dict[str, Any], into: float, out: float) -> SSDConfig:
    check_activation(c, "hidden_act")
    inner = c["mamba_expand"] * c["hidden_size"] if c["mamba_d_ssm"] is None else c["mamba_d_ssm"]
    heads, bias = c["mamba_n_heads"], bool(c.get("mamba_proj_bias"))
    head_dim = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    check_sizes("mamba_d_head", head_dim, heads, inner)
    _check_bias("ssm_in_multiplier", into, "mamba_proj_bias", bias)
    return SSDConfig(
        heads=heads,
        head_dim=head_dim,
        state_size=c.get("mamba_d_state", 256),
        groups=c.get("mamba_n_groups", 1),
        kernel=c.get("mamba_d_conv", 4),
        conv_bias=bool(c.get("mamba_conv_bias", True)),
        bias=bias,
        output_bias=bool(c.get("projectors_bias")),
        norm=_norm_place(c),
        scales=tuple(into * factor for factor in c.get("ssm_multipliers") or (1.0,) * 5),
        out_scale=out,
        **hf_time_step_limits(c),
    )


def _norm_place(c: dict[str, Any]) -> NormPlace | None:
    if not c.get("mamba_rms_norm"):
        return None
    return "before_gate" if c.get("mamba_norm_before_gate", True) else "after_gate"


def _layers(rope: RopeConfig, count: int) -> tuple[LayerKind, ...]:
    return (LayerKind(rope, mixer="attention_beside_ssd"),) * count


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    layer, mlp = "model.layers.*", "model.layers.*.feed_forward"
    return {
        "norm.weight": "model.final_layernorm.weight",
        "layers.*.mlp_norm.weight": f"{layer}.pre_ff_layernorm.weight",
        **hf_linear("layers.*.mlp.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        **hf_linear("layers.*.mlp.down", f"{mlp}.down_proj"),
        **hf_ssd_names(config, f"{layer}.mamba"),
    }


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """llama.cpp calls one norm without saying that it is a weight."""
    norm = AnyOf("blk.*.ffn_norm", "blk.*.ffn_norm.weight")
    return gguf_ssd_names(config) | {"layers.*.mlp_norm.weight": norm}


GGUF: Table = {
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": gguf_ssd_head_dim,
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
"""All factors are in the weights of such a file."""


FAMILY = Family(
    name="Falcon-H1",
    models="Falcon-H1 (0.5B to 34B), Falcon-H1R",
    architectures=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    from_hf=from_hf,
    gguf_architectures=("falcon-h1",),
    gguf=GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
