"""Starcoder2ForCausalLM, SeedOssForCausalLM, both HunYuan…V1ForCausalLM, MiniMaxM2ForCausalLM and InternLM 3."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

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

_HUNYUAN_MOE = _HUNYUAN | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "moe_topk": 3,
    "intermediate_size": 48,
}

_INTERNLM3 = without(_SEED, "attention_out_bias") | {
    "architectures": ["LlamaForCausalLM"],  # transformers has a class for its config alone
    "model_type": "internlm3",
    "mlp_bias": True,
    "rope_theta": 1000.0,
}

_MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 167,
    "hidden_size": 72,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rotary_dim": 12,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "tie_word_embeddings": False,
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
    "minimax_m2": Variant(
        "a norm over all heads of queries, and of keys; half of each head rotated; sigmoids and a bias on the choice",
        _MINIMAX,
        seed=1,
        unlike=({"rotary_dim": 24}, {"num_experts_per_tok": 3}, {"rope_theta": 100.0}),
    ),
    "hunyuan": Variant(
        "norms on queries and keys after the rotation, whose base alpha stretches whatever the length; tied",
        _HUNYUAN,
        unlike=({"rope_scaling": _HUNYUAN["rope_scaling"] | {"alpha": 10.0}},),
    ),
    "hunyuan_moe": Variant(
        "the same with experts beside a shared one in every layer",
        _HUNYUAN_MOE,
        unlike=({"moe_topk": 2}, {"rope_scaling": _HUNYUAN["rope_scaling"] | {"alpha": 10.0}}),
    ),
    "internlm3": Variant(
        "Llama under another name, with biases on attention and the MLP",
        _INTERNLM3,
        unlike=({"rope_theta": 100.0},),
    ),
}
