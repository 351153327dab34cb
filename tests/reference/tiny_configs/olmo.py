"""Olmo2ForCausalLM and Olmo3ForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 143,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "attention_factor": 1.1386294361119891,
}

_OLMO3 = without(_OLMO2, "rms_norm_eps") | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "vocab_size": 145,
    "hidden_size": 84,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
    "sliding_window": 11,
    "rope_scaling": _YARN,
}

VARIANTS: dict[str, Variant] = {
    "olmo2": Variant(
        "norms on what attention and MLP give and none in front; one over all heads of queries, and of keys",
        _OLMO2,
        unlike=({"rope_theta": 100.0}, {"rms_norm_eps": 0.02}),
    ),
    "olmo3": Variant(
        "a window on three layers of four by default, and yarn on the fourth alone",
        _OLMO3,
        unlike=({"sliding_window": 12}, {"rope_scaling": None}, {"layer_types": ["full_attention"] * 4}),
    ),
    "olmo3_new_rope": Variant(
        "a rope for each kind of layer in the newer spelling, biases, which layers have a window in a list",
        without(_OLMO3, "rope_scaling", "rope_theta")
        | {
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _YARN | {"rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}
