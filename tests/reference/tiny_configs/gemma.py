"""GemmaForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM and Gemma3ForConditionalGeneration."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import MODEL_LANGUAGE_MODEL, Variant, without

_GEMMA: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "vocab_size": 137,
    "hidden_size": 56,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

_GEMMA2 = without(_GEMMA, "hidden_act") | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "sliding_window": 13,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}


def _wrapped(text: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 10,
        "eoi_token_index": 11,
        "image_token_index": 12,
        "mm_tokens_per_image": 1,
        "vision_config": _SIGLIP,
        "text_config": without(text, "architectures", "tie_word_embeddings"),
        "eos_token_id": [1, 6],
        "torch_dtype": "float32",
        **config,
    }


_GEMMA3_TEXT = without(_GEMMA3, "num_attention_heads", "num_key_value_heads") | {
    "vocab_size": 135,
    "num_hidden_layers": 3,
    "head_dim": 20,
    "intermediate_size": 88,
    "sliding_window": 11,
}

VARIANTS: dict[str, Variant] = {
    "gemma": Variant(
        "the embedding scaled, norms of 1 + weight, `gelu` that means its tanh form, one KV head; tied by default",
        _GEMMA,
        unlike=({"rms_norm_eps": 1e-2},),
    ),
    "gemma2": Variant(
        "caps on scores and on logits, low enough to matter; a window on even layers; a scale that is not head_dim's",
        _GEMMA2 | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 14},
        unlike=(
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 24},
            {"sliding_window": 14},
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
    ),
    "gemma2_defaults": Variant(
        "caps and scale that the file leaves to the family: 50, 30 and 256; layer_types spelled out",
        _GEMMA2
        | {
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        unlike=(
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 24},
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
    ),
    "gemma3_small": Variant(
        "seven layers, five local to one global; the scale is not head_dim^-0.5",
        _GEMMA3 | {"sliding_window_pattern": 6, "query_pre_attn_scalar": 20},
        prompt_length=80,
    ),
    "gemma3_mqa": Variant(
        "rope in the newer spelling, one entry per layer type; an explicit layer pattern",
        {key: value for key, value in _GEMMA3.items() if not key.startswith("rope_")}
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
        prompt_length=80,
    ),
    "gemma3_softcap": Variant(
        "a cap on logits, which published Gemma 3 models do not have",
        _GEMMA3
        | {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 2.0,
        },
        unlike=({"final_logit_softcapping": None},),
    ),
    "gemma3_linear_rope": Variant(
        "linear rope scaling on the global layers only",
        _GEMMA3
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        prompt_length=96,
    ),
    "gemma3_conditional": Variant(
        "a multimodal checkpoint: text_config without its numbers of heads, names under language_model.model",
        _wrapped(_GEMMA3_TEXT | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 3}),
        unlike=({"text_config": {"rope_scaling": None}}, {"text_config": {"sliding_window_pattern": 2}}),
    ),
    "gemma3_conditional_renamed": Variant(
        "a multimodal checkpoint with names under model.language_model, local layers only by default",
        _wrapped(_GEMMA3_TEXT | {"query_pre_attn_scalar": 12}),
        unlike=({"text_config": {"query_pre_attn_scalar": 20}}, {"text_config": {"sliding_window": 12}}),
        renamed=MODEL_LANGUAGE_MODEL,
    ),
}
