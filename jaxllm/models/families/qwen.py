"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern

# Qwen 2, Qwen 2.5 and QwQ: Llama with biases on queries, keys and values (arXiv:2407.10671)

MAX_WINDOW_LAYERS = 28


def qwen2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """o has no bias."""
    return DecoderConfig(**hf_fields(c, layers=windowed_layers(c), qkv_bias=True))


def windowed_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    """With `use_sliding_window`, layers from `max_window_layers` on slide, or those that `layer_types` says."""
    rope, number = hf_rope(c, hf_head_dim(c)), c["num_hidden_layers"]
    if not c.get("use_sliding_window"):
        return (LayerKind(rope),) * number
    first = c.get("max_window_layers", MAX_WINDOW_LAYERS)
    kinds = c.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(number)]
    window = c.get("sliding_window", 4096)
    return tuple(LayerKind(rope, window if kind == "sliding_attention" else None) for kind in kinds)


QWEN2 = Family(
    name="Qwen 2",
    models="Qwen 2, 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    from_hf=qwen2_from_hf,
    gguf_architectures=("qwen2",),
    gguf={},
)


# Qwen 3, its embedding and reranking models: a norm on every query and key head (arXiv:2505.09388)


def qwen3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Heads have 128 channels where `head_dim` is absent."""
    c = {"head_dim": 128} | c
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, layers=windowed_layers(c), qk_norm="rms", qkv_bias=bias, output_bias=bias))


QWEN3 = Family(
    name="Qwen 3",
    models="Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    model_types=("qwen3",),
    from_hf=qwen3_from_hf,
    gguf_architectures=("qwen3",),
    gguf={},
)


# Qwen 2 and Qwen 3 with a mixture of experts; the former also has an expert that every token passes


def qwen2_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """With `use_sliding_window`, every other one of the first `max_window_layers` layers slides."""
    c = {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    } | c  # fmt: skip
    first = c.get("max_window_layers", 28)
    layers = _moe_layers(c, [i % 2 == 0 and i < first for i in range(c["num_hidden_layers"])])
    moe = replace(_experts(c), shared_hidden=c["shared_expert_intermediate_size"], shared_gate=True)
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=c.get("qkv_bias", True), moe=moe))


def qwen3_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """With `use_sliding_window`, every layer slides."""
    c = {
        "num_key_value_heads": 4, "num_experts": c.get("num_local_experts", 128), "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    } | c  # fmt: skip
    layers = _moe_layers(c, [True] * c["num_hidden_layers"])
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, layers=layers, qk_norm="rms", qkv_bias=bias, output_bias=bias, moe=_experts(c)))


def _moe_layers(c: dict[str, Any], sliding: list[bool]) -> tuple[LayerKind, ...]:
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


QWEN2_MOE_GGUF: Table = GGUF_EXPERTS | {
    "moe_intermediate_size": _gguf_expert_size,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
QWEN3_MOE_GGUF: Table = GGUF_EXPERTS | {"moe_intermediate_size": _gguf_expert_size, "norm_topk_prob": True}
"""Weights are renormalised, as in all published models; a file does not say it."""


def qwen_moe_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """There is one shared expert, so it is not in the plural."""
    return hf_expert_names(config, "model.layers.*.mlp", shared="shared_expert")


QWEN2_MOE = Family(
    name="Qwen 2 MoE",
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    from_hf=qwen2_moe_from_hf,
    hf_names=qwen_moe_hf_names,
    gguf_architectures=("qwen2moe",),
    gguf=QWEN2_MOE_GGUF,
)

QWEN3_MOE = Family(
    name="Qwen 3 MoE",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    from_hf=qwen3_moe_from_hf,
    gguf_architectures=("qwen3moe",),
    gguf=QWEN3_MOE_GGUF,
)
