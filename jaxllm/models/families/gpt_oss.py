"""gpt-oss: attention sinks, every other layer with a window, biased experts with a clamped gate (arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, Table, layer_types, nonzero, optional, rope_scaling
from jaxllm.models.hf import hf_fields, hf_rope, hf_rope_parameters, hf_windows
from jaxllm.models.layers.mlp import ClampedSwiglu
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.names import AnyOf, Pattern, Source, halves_apart, transposed

THETA = 150_000.0
ROPE: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""`rope_parameters` of a config that has none."""
SWIGLU = ClampedSwiglu(1.702, 7.0)
DEFAULTS = {
    "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 128, "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is that of the experts."""
    c = DEFAULTS | {"num_local_experts": c.get("num_experts", 128)} | c
    given = hf_rope_parameters(c, ROPE)
    rope = hf_rope(c, c["head_dim"] or c["hidden_size"] // c["num_attention_heads"], theta=THETA, parameters=given)
    swiglu = ClampedSwiglu(float(c.get("swiglu_alpha", SWIGLU.alpha)), float(c.get("swiglu_limit", SWIGLU.limit)))
    moe = _experts(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"], swiglu)
    bias = c.get("attention_bias", True)
    layers = _layers(rope, hf_windows(c, period=2))
    return DecoderConfig(**hf_fields(c, layers=layers, moe=moe, qkv_bias=bias, output_bias=bias, attention_sinks=True))


def _experts(count: int, top_k: int, hidden: int, swiglu: ClampedSwiglu) -> MoEConfig:
    return MoEConfig(
        num_experts=count,
        top_k=top_k,
        hidden=hidden,
        renormalize=True,
        router_bias=True,
        expert_bias=True,
        swiglu=swiglu,
    )


def _layers(rope: RopeConfig, windows: list[int | None]) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(rope, window, sparse=True) for window in windows)


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Rows of gate and up by turns. What is published as MXFP4 lies `[out, in]`, and what is not `[in, out]`."""
    block, experts = "model.layers.*.mlp", "model.layers.*.mlp.experts"
    return {
        "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
        "layers.*.mlp.router.weight": f"{block}.router.weight",
        "layers.*.mlp.router.bias": f"{block}.router.bias",
        "layers.*.mlp.experts.gate_up.weight": AnyOf(
            Source(f"{experts}.gate_up_proj_blocks", halves_apart, by_rows=True),
            Source(f"{experts}.gate_up_proj", _transposed_halves),
        ),
        "layers.*.mlp.experts.gate_up.bias": Source(f"{experts}.gate_up_proj_bias", halves_apart),
        "layers.*.mlp.experts.down.weight": AnyOf(
            f"{experts}.down_proj_blocks", Source(f"{experts}.down_proj", transposed)
        ),
        "layers.*.mlp.experts.down.bias": f"{experts}.down_proj_bias",
    }


def _transposed_halves(weight: np.ndarray) -> np.ndarray:
    return halves_apart(transposed(weight))


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norm in front of the experts is called after what it comes after."""
    return {
        "layers.*.mlp_norm.weight": "blk.*.post_attention_norm.weight",
        "layers.*.attention.sinks": "blk.*.attn_sinks.weight",
        "layers.*.mlp.router.bias": "blk.*.ffn_gate_inp.bias",
    }


GGUF: Table = GGUF_EXPERTS | {
    "intermediate_size": "expert_feed_forward_length",
    "sliding_window": nonzero("attention.sliding_window"),
    "layer_types": layer_types(2),
    "rope_theta": optional("rope.freq_base", THETA),
    "rope_scaling": lambda file: rope_scaling(file) | {"truncate": False},
}
"""A file does not say that the bounds of YaRN's ramp are not rounded, nor what the gate is."""


FAMILY = Family(
    name="gpt-oss",
    models="gpt-oss 20B, 120B",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("gpt-oss",),
    gguf=GGUF,
    gguf_names=gguf_names,
)
