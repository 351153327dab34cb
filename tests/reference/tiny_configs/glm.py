"""GlmForCausalLM (GLM-4-9B), Glm4ForCausalLM (GLM-4-0414) and Glm4MoeForCausalLM (GLM-4.5)."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_GLM: dict[str, Any] = {
    "architectures": ["GlmForCausalLM"],
    "model_type": "glm",
    "vocab_size": 135,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 3, 4],
    "pad_token_id": 2,
    "torch_dtype": "float32",
}

_GLM4 = _GLM | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 137}

_GLM4_MOE = without(_GLM, "head_dim", "attention_bias") | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 139,
    "head_dim": 24,
    "moe_intermediate_size": 44,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}

VARIANTS: dict[str, Variant] = {
    "glm": Variant(
        "interleaved rope on half of each head and biases on q, k and v, both by default; fused gate_up",
        without(_GLM, "attention_bias"),
        unlike=({"partial_rotary_factor": 1.0},),
    ),
    "glm4": Variant(
        "a norm after attention and after the MLP besides those before; biases on q, k and v",
        _GLM4 | {"partial_rotary_factor": 0.5},
        unlike=({"partial_rotary_factor": 1.0},),
    ),
    "glm4_no_bias": Variant(
        "no biases, one KV head, rope in the newer spelling",
        without(_GLM4, "rope_theta")
        | {
            "attention_bias": False,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
        },
        unlike=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 1.0}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        ),
    ),
    "glm4_moe": Variant(
        "half of each head rotated, not interleaved; biases and norms on queries and keys; V3's experts after a dense "
        "layer, beside two shared ones",
        _GLM4_MOE,
        seed=1,
        unlike=({"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, {"partial_rotary_factor": 1.0}),
    ),
}
