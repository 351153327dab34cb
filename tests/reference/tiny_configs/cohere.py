"""CohereForCausalLM (Command-R) and Cohere2ForCausalLM (Command R7B, Command A)."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_COHERE: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "vocab_size": 149,
    "hidden_size": 72,
    "intermediate_size": 102,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "logit_scale": 0.5,
    "use_qk_norm": False,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

_COHERE2 = without(_COHERE, "use_qk_norm") | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "vocab_size": 151,
    "hidden_size": 80,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 13,
    "sliding_window_pattern": 4,
}

VARIANTS: dict[str, Variant] = {
    "cohere": Variant(
        "attention and MLP from one LayerNorm without bias, pairs of neighbours rotated, a factor on the logits, tied",
        _COHERE,
        unlike=({"logit_scale": 0.25}, {"rope_theta": 100.0}),
    ),
    "cohere_qk_norm": Variant(
        "a LayerNorm of its own for every query and key head; biases on all four products",
        _COHERE | {"use_qk_norm": True, "attention_bias": True},
    ),
    "cohere2": Variant(
        "a window on three layers of four, and no positions in the fourth",
        _COHERE2,
        unlike=({"sliding_window": 14}, {"sliding_window_pattern": 2}),
    ),
}
