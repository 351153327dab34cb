"""Qwen 2 and Qwen 3 with a mixture of experts; the former also has an expert that every token passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern


def qwen2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """With `use_sliding_window`, every other one of the first `max_window_layers` layers slides."""
    c = {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    } | c  # fmt: skip
    first = c.get("max_window_layers", 28)
    layers = _layers(c, [i % 2 == 0 and i < first for i in range(c["num_hidden_layers"])])
    moe = replace(_experts(c), shared_hidden=c["shared_expert_intermediate_size"], shared_gate=True)
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=c.get("qkv_bias", True), moe=moe))


def qwen3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """With `use_sliding_window`, every layer slides."""
    c = {
        "num_key_value_heads": 4, "num_experts": c.get("num_local_experts", 128), "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    } | c  # fmt: skip
    layers = _layers(c, [True] * c["num_hidden_layers"])
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, layers=layers, qk_norm="rms", qkv_bias=bias, output_bias=bias, moe=_experts(c)))


def _layers(c: dict[str, Any], sliding: list[bool]) -> tuple[LayerKind, ...]:
    rope, window = hf_rope(c, hf_head_dim(c)), c.get("sliding_window", 4096)
    if c.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in c["layer_types"]]
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return tuple(
        LayerKind(
            rope,
            window if slides and c.get("use_sliding_window") else None,
            sparse=index not in dense and (index + 1) % step == 0,
        )
        for index, slides in enumerate(sliding)
    )


def _experts(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        hidden=c["moe_intermediate_size"],
        scoring="softmax",
        renormalize=bool(c.get("norm_topk_prob", False)),
    )


def _gguf_expert_size(file: GgufFile) -> int:
    return file("expert_feed_forward_length", file("feed_forward_length") // max(file("expert_used_count"), 1))


QWEN2_GGUF: Table = GGUF_EXPERTS | {
    "moe_intermediate_size": _gguf_expert_size,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
QWEN3_GGUF: Table = GGUF_EXPERTS | {"moe_intermediate_size": _gguf_expert_size, "norm_topk_prob": True}
"""Weights are renormalised, as in all published models; a file does not say it."""


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """There is one shared expert, so it is not in the plural."""
    return hf_expert_names(config, "model.layers.*.mlp", shared="shared_expert")


QWEN2_MOE = Family(
    name="Qwen 2 MoE",
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    from_hf=qwen2_from_hf,
    hf_names=hf_names,
    gguf_architectures=("qwen2moe",),
    gguf=QWEN2_GGUF,
)

QWEN3_MOE = Family(
    name="Qwen 3 MoE",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    from_hf=qwen3_from_hf,
    gguf_architectures=("qwen3moe",),
    gguf=QWEN3_GGUF,
)
