"""GPT2LMHeadModel and GPTNeoXForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 56,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 100,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 133,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "gpt2": Variant(
        "learned positions, matrices the other way round, an MLP four times as wide",
        _GPT2,
        unlike=({"layer_norm_epsilon": 0.05}, {"activation_function": "relu"}, {"scale_attn_weights": False}),
    ),
    "gpt_neox": Variant(
        "attention and MLP beside each other behind norms of their own, few channels rotated",
        _NEOX,
        unlike=({"rotary_pct": 0.5}, {"use_parallel_residual": False}, {"rotary_emb_base": 100}),
    ),
    "gpt_neox_in_turn": Variant(
        "one after the other, without biases on attention",
        _NEOX | {"use_parallel_residual": False, "attention_bias": False},
    ),
}
