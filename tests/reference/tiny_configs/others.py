"""Starcoder2ForCausalLM, SeedOssForCausalLM and HunYuanDenseV1ForCausalLM."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_STARCODER2: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "vocab_size": 159,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "rope_theta": 100000.0,
    "sliding_window": 15,
    "use_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

_SEED: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "vocab_size": 161,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}

_HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 163,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "starcoder2": Variant(
        "LayerNorm and biases throughout, an MLP without a gate, a window on every layer; tied by default",
        _STARCODER2,
        unlike=({"sliding_window": 16}, {"norm_epsilon": 0.02}),
    ),
    "seed_oss": Variant(
        "biases on q, k and v and not on the output, heads of a size of their own",
        _SEED,
        unlike=({"rope_theta": 100.0},),
    ),
    "hunyuan": Variant(
        "norms on queries and keys after the rotation, whose base alpha stretches whatever the length; tied",
        _HUNYUAN,
        unlike=({"rope_scaling": _HUNYUAN["rope_scaling"] | {"alpha": 10.0}},),
    ),
}
