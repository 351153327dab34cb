"""GraniteForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 153,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "granite": Variant(
        "factors on embeddings, attention logits, residual sums and logits; tied",
        _GRANITE,
        unlike=(
            {"embedding_multiplier": 1.0},
            {"attention_multiplier": 12**-0.5},
            {"residual_multiplier": 1.0},
            {"logits_scaling": 1.0},
        ),
    ),
}
