"""GLM-4, and GLM-4.5 to 4.7 with experts."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek
from jaxllm.models.families.deepseek import ROUTED_GGUF, SIGMOID, latent_config, sigmoid_experts
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, only, tensor
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_mtp_names, hf_rope
from jaxllm.weights.names import NameMap, Pattern

# GLM-4: half of each head is rotated, in neighbouring pairs (arXiv:2406.12793); the 0414 models have more norms

GLM_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131_072,
}


def glm_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """q, k and v have biases unless `attention_bias` says otherwise; o has none."""
    return DecoderConfig(**_fields(c))


def glm4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The same with four norms a layer."""
    return DecoderConfig(**_fields(c), post_norms=True)


def _fields(c: dict[str, Any]) -> dict[str, Any]:
    c = GLM_DEFAULTS | c
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


# GLM-4.5 to 4.7: half of each head rotated, and DeepSeek V3's experts (arXiv:2508.06471). Flash is a DeepSeek V3

GLM4_MOE_DEFAULTS = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip

LITE_DEFAULTS = GLM4_MOE_DEFAULTS | {
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "num_key_value_heads": 20, "max_position_embeddings": 202_752,
}  # fmt: skip


def glm4_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """q, k and v may have biases, and o has none; the larger models have norms on queries and keys."""
    c = GLM4_MOE_DEFAULTS | c
    rope, dense = hf_rope(c, hf_head_dim(c), partial=0.5), c["first_k_dense_replace"]
    return DecoderConfig(
        **hf_fields(
            c,
            layers=tuple(LayerKind(rope, sparse=i >= dense) for i in range(c["num_hidden_layers"])),
            moe=sigmoid_experts(c),
            qkv_bias=c.get("attention_bias", False),
            qk_norm="rms" if c.get("use_qk_norm") else None,
        )
    )


def lite_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Which layers have experts is said by `mlp_layer_types`: by default all but the first."""
    c = LITE_DEFAULTS | c
    kinds = c.get("mlp_layer_types") or ["dense", *["sparse"] * (c["num_hidden_layers"] - 1)]
    sparse = [kind == "sparse" for kind in kinds]
    return latent_config(c, sigmoid_experts(c), interleaved=bool(c.get("rope_interleave", True)), sparse=sparse)


GLM4_MOE_GGUF: Table = ROUTED_GGUF | {
    "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
    "scoring_func": only("expert_gating_func", SIGMOID, "sigmoid"),
}


def glm4_moe_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norm in front of the MLP is called after what it comes after."""
    return {"layers.*.mlp_norm.weight": "blk.*.post_attention_norm.weight"}


def glm4_moe_mtp_names(config: DecoderConfig, num_layers: int) -> NameMap:
    """As DeepSeek V3's, of a layer whose tensors have the usual names."""
    return hf_mtp_names(config, {}, num_layers)


MOE = Family(
    name="GLM-4.5",
    models="GLM-4.5, 4.5-Air, 4.6, 4.7",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    from_hf=glm4_moe_from_hf,
    mtp_names=glm4_moe_mtp_names,
    gguf_architectures=("glm4moe",),
    gguf=GLM4_MOE_GGUF,
    gguf_names=glm4_moe_gguf_names,
)

LITE = Family(
    name="GLM-4.7-Flash",
    models="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    from_hf=lite_from_hf,
    hf_names=deepseek.hf_names,
    mtp_names=deepseek.mtp_names,
    gguf_architectures=("deepseek2",),
)
