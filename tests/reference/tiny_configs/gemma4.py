"""Gemma4ForCausalLM, Gemma4UnifiedForCausalLM and Gemma4ForConditionalGeneration."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 137,
    "vocab_size_per_layer_input": 137,
    "hidden_size": 56,
    "hidden_size_per_layer_input": 12,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": 13,
    "rope_parameters": _ROPES,
    "max_position_embeddings": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

_MOE = without(_GEMMA4, "vocab_size_per_layer_input") | {
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 44,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": None,
}

_UNIFIED = without(
    _MOE, "hidden_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"
) | {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}

_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}

VARIANTS: dict[str, Variant] = {
    "gemma4": Variant(
        "keys and values shared by the last layers, whose MLPs are twice as wide; heads of two sizes; an input of each "
        "layer's own; pairs of the larger heads that do not rotate",
        _GEMMA4,
        seed=2,
        unlike=(
            {"final_logit_softcapping": None},
            {"sliding_window": 12},
            {"rope_parameters": _ROPES | {"full_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
        ),
    ),
    "gemma4_moe": Variant(
        "a dense MLP beside experts, each with norms of its own; values that are the keys, in layers without a window, "
        "which have fewer KV heads; bidirectional attention, which is for images alone",
        _MOE,
        unlike=({"top_k_experts": 2}, {"sliding_window": 12}),
    ),
    "gemma4_unified": Variant(
        "the same without experts, under the 12B model's own names",
        _UNIFIED,
        unlike=({"sliding_window": 12},),
    ),
    "gemma4_conditional": Variant(
        "a multimodal checkpoint: text_config, and a tower for images",
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": without(_GEMMA4, "architectures", "tie_word_embeddings"),
            "vision_config": _VISION,
            "audio_config": None,
            "image_token_id": 1000,  # which no text has
            "video_token_id": 1001,
            "audio_token_id": 1002,
            "torch_dtype": "float32",
        },
        seed=1,
    ),
}
