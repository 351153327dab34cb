"""GptOssForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 165,
    "hidden_size": 72,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": _YARN,
    "sliding_window": 11,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.1,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "gpt_oss": Variant(
        "sinks, a window on every other layer by default, biases of router and experts, a clamped gate, yarn whose "
        "bounds are not rounded",
        _GPT_OSS,
        unlike=(
            {"sliding_window": 12},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 2},
            {"rope_scaling": _YARN | {"truncate": True}},
            {"layer_types": ["full_attention"] * 3},
        ),
    ),
}
