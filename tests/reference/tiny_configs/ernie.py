"""Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "vocab_size": 155,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

_MOE = without(_ERNIE, "head_dim") | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "vocab_size": 157,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 40,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}

VARIANTS: dict[str, Variant] = {
    "ernie4_5": Variant(
        "pairs of neighbours rotated in heads of a size of their own; tied",
        _ERNIE,
        unlike=({"rope_theta": 100.0},),
    ),
    "ernie4_5_moe": Variant(
        "experts by softmax, with a bias on the choice alone that is a row of a matrix, beside two shared ones",
        _MOE,
        seed=1,
        unlike=({"moe_k": 2},),
    ),
}
