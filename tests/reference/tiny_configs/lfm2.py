"""Lfm2ForCausalLM and Lfm2MoeForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 141,
    "hidden_size": 64,
    "intermediate_size": 130,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2],
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_MOE: dict[str, Any] = without(
    _LFM2, "full_attn_idxs", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
) | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "intermediate_size": 132,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "num_dense_layers": 1,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
}

VARIANTS = {
    "lfm2": Variant(
        "convolutions of three taps around one layer of attention; an MLP of two thirds of the stated size",
        _LFM2,
        unlike=({"rope_theta": 100.0}, {"norm_eps": 0.02}),
    ),
    "lfm2_bias": Variant(
        "attention first, biases in the convolutions, which have four taps, a head of its own, the MLP as stated",
        without(_LFM2, "full_attn_idxs", "tie_word_embeddings")
        | {
            "layer_types": ["full_attention", "conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "intermediate_size": 132,
            "tie_embedding": False,
            "num_key_value_heads": 4,
        },
        unlike=({"rope_theta": 100.0},),
    ),
    "lfm2_moe": Variant(
        "experts from the second layer on, chosen by sigmoids with a bias on the choice alone",
        _MOE,
        unlike=({"norm_topk_prob": False}, {"num_experts_per_tok": 2}, {"routed_scaling_factor": 2.0}),
    ),
}
