"""DeepseekV2ForCausalLM (V2, V2-Lite), DeepseekV3ForCausalLM (V3, R1), Glm4MoeLiteForCausalLM (GLM-4.7-Flash) and
Mistral4ForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 139,
    "hidden_size": 72,
    "intermediate_size": 100,
    "moe_intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": _YARN,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_V3 = _V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 131,
    "hidden_size": 56,
    "q_lora_rank": 36,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}

_MISTRAL4 = without(_V3, "rope_scaling", "rope_theta", "topk_method", "scoring_func", "moe_layer_freq") | {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "vocab_size": 133,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

VARIANTS: dict[str, Variant] = {
    "deepseek_v2_lite": Variant(
        "latent attention with a plain query projection; greedy routing; two shared experts; a dense layer first",
        _V2,
        unlike=({"rope_scaling": None}, {"rope_scaling": _YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
    ),
    "deepseek_v2": Variant(
        "low-rank queries; the best groups by their best expert; scaled weights; mscale on the rotary part as well",
        _V2
        | {
            "q_lora_rank": 36,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_scaling": _YARN | {"mscale": 1.2},
        },
        seed=1,
        unlike=(
            {"rope_scaling": _YARN},
            {"topk_method": "greedy"},
            {"topk_group": 3},
            {"routed_scaling_factor": 1.0},
        ),
    ),
    "glm4_moe_lite": Variant(
        "V3's attention and experts, in the layer that a list names",
        without(_V3, "first_k_dense_replace", "topk_method", "scoring_func", "moe_layer_freq")
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "vocab_size": 145,
            "rope_scaling": None,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
            "routed_scaling_factor": 1.8,
        },
        unlike=({"routed_scaling_factor": 1.0},),
    ),
    "mistral4": Variant(
        "latent attention whose queries grow past the original context; experts by softmax, renormalised; stacked",
        _MISTRAL4,
        unlike=(
            {"norm_topk_prob": False},
            {"rope_parameters": _MISTRAL4["rope_parameters"] | {"llama_4_scaling_beta": 0.6}},
            {"rope_parameters": _MISTRAL4["rope_parameters"] | {"mscale_all_dim": 0.1}},
        ),
    ),
    "deepseek_v3": Variant(
        "sigmoid scores, a bias for the choice alone, the best groups by their best two; renormalised and scaled",
        _V3,
        unlike=(
            {"rope_scaling": _YARN},
            {"rope_interleave": False},
            {"topk_group": 3},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
        ),
    ),
    "deepseek_v3_plain": Variant(
        "plain queries, half-split rope, one group, weights not renormalised; latent norms keep an epsilon of 1e-6",
        without(_V3, "rope_scaling")
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-2,
        },
        seed=1,
        unlike=({"rope_interleave": True}, {"norm_topk_prob": True}, {"rms_norm_eps": 1e-6}),
    ),
}
