"""BloomForCausalLM and MptForCausalLM, whose positions are biases by distance; heads that are no power of two too."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 135,
    "hidden_size": 72,
    "n_head": 6,
    "n_layer": 3,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 200,
    "torch_dtype": "float32",
}

_MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "vocab_size": 137,
    "d_model": 64,
    "n_heads": 8,
    "n_layers": 3,
    "expansion_ratio": 4,
    "max_seq_len": 180,
    "layer_norm_epsilon": 1e-5,
    "no_bias": True,
    "attn_config": {"alibi": True, "alibi_bias_max": 8},
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "bloom": Variant(
        "six heads' slopes, a norm on the embedding, biases, queries beside keys and values of their head",
        _BLOOM,
        unlike=({"layer_norm_epsilon": 0.05}, {"n_head": 12}),
    ),
    "mpt": Variant(
        "slopes without positions else, no biases at all",
        _MPT,
        unlike=({"attn_config": {"softmax_scale": 1.0}}, {"layer_norm_epsilon": 0.05}),
    ),
    "mpt_clipped": Variant(
        "queries, keys and values that are no further from 0 than 0.4",
        _MPT | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 0.4}},
        unlike=({"attn_config": {"clip_qkv": None}}, {"attn_config": {"clip_qkv": 0.5}}),
    ),
    "mpt_scaled": Variant(
        "five heads, a scale of its own; transformers knows one steepness of slopes alone",
        _MPT | {"d_model": 60, "n_heads": 5, "attn_config": {"softmax_scale": 0.5}},
    ),
}
