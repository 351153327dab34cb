"""GLM-4: half of each head is rotated, in neighbouring pairs (arXiv:2406.12793); the 0414 models have more norms."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope
from jaxllm.weights.names import Pattern

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072}


def glm_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """q, k and v have biases unless `attention_bias` says otherwise; o has none."""
    return DecoderConfig(**_fields(c))


def glm4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The same with four norms a layer."""
    return DecoderConfig(**_fields(c), post_norms=True)


def _fields(c: dict[str, Any]) -> dict[str, Any]:
    c = DEFAULTS | c
    rope = hf_rope(c, hf_head_dim(c), partial=0.5, interleaved=True)
    layers = (LayerKind(rope),) * c["num_hidden_layers"]
    return hf_fields(c, layers=layers, qkv_bias=c.get("attention_bias", True))


def glm4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """`post_attention_layernorm` is the norm in front of the MLP, as in Llama."""
    return {
        "layers.*.attention_post_norm.weight": "model.layers.*.post_self_attn_layernorm.weight",
        "layers.*.mlp_post_norm.weight": "model.layers.*.post_mlp_layernorm.weight",
    }


GLM = Family(
    name="GLM-4",
    models="GLM-4-9B-hf, GLM-4-9B-chat-hf",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    from_hf=glm_from_hf,
)

GLM4 = Family(
    name="GLM-4-0414",
    models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    from_hf=glm4_from_hf,
    gguf_architectures=("glm4",),
    gguf={},
    hf_names=glm4_hf_names,
)
