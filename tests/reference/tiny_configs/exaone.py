"""Exaone4ForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_EXAONE4: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "vocab_size": 147,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": _LLAMA3,
    "sliding_window": 13,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "exaone4": Variant(
        "norms on outputs alone, a norm on every query and key head, no positions in every fourth layer",
        _EXAONE4,
        unlike=({"sliding_window": 14}, {"sliding_window_pattern": 3}, {"rope_scaling": None}),
    ),
    "exaone4_full": Variant(
        "no window: every layer rotates; tied",
        without(_EXAONE4, "sliding_window_pattern")
        | {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
}
