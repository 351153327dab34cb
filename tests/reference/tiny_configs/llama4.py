"""Llama4ForCausalLM and Llama4ForConditionalGeneration."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "vocab_size": 149,
    "hidden_size": 64,
    "intermediate_size": 44,
    "intermediate_size_mlp": 92,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
    "attention_chunk_size": 13,
    "attn_scale": 0.5,
    "floor_scale": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": True,
    "attention_bias": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "llama4": Variant(
        "attention in chunks, a layer without positions whose queries grow, norms without weights, one expert beside a "
        "shared one in every other layer, bands of rotary scaling that meet",
        _LLAMA4,
        unlike=(
            {"attention_chunk_size": 14},
            {"attn_scale": 0.1},
            {"floor_scale": 17},
            {"use_qk_norm": False},
            {"rope_scaling": None},
            {"no_rope_layers": [1, 1, 0, 1]},
        ),
    ),
    "llama4_plain": Variant(
        "none of that but the experts, two of which a token uses; biases on attention",
        _LLAMA4
        | {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_chunk_size": None,
            "no_rope_layers": [1, 0, 1, 1],
            "moe_layers": [0, 1],
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "rope_scaling": None,
        },
        unlike=({"num_experts_per_tok": 1}, {"no_rope_layers": [1, 1, 1, 1]}),
    ),
}
