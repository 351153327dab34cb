"""Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, and their multimodal wrappers."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant, without

_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
_MROPE = _ROPE | {"mrope_interleaved": True, "mrope_section": [1, 1, 1]}

_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 36,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 52,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
)  # fmt: skip

_DENSE: dict[str, Any] = without(_NEXT, *_EXPERTS, "rope_theta", "partial_rotary_factor", "full_attention_interval") | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 149,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": _MROPE,
    "intermediate_size": 96,
    "head_dim": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 6,
}
"""All of its weights fit into the tiles of the kernels for CPUs."""

_MOE: dict[str, Any] = without(
    _NEXT, "intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rope_theta",
    "partial_rotary_factor",
) | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 147,
    "rope_parameters": _MROPE,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_value_head_dim": 12,
}  # fmt: skip

_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _wrapped(text: dict[str, Any]) -> dict[str, Any]:
    """A multimodal config around this text model's."""
    kind = text["model_type"].removesuffix("_text")
    return {
        "architectures": [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
        "model_type": kind,
        "text_config": without(text, "architectures", "tie_word_embeddings"),
        "vision_config": _VISION | {"model_type": f"{kind}_vision"},
        "image_token_id": 11,
        "video_token_id": 12,
        "vision_start_token_id": 13,
        "vision_end_token_id": 14,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


VARIANTS = {
    "qwen3_next": Variant(
        "three layers of the gated delta rule and one of attention with a gate; experts beside a shared one",
        _NEXT,
        unlike=(
            {"rope_theta": 100.0},
            {"partial_rotary_factor": 0.5},
            {"norm_topk_prob": False},
            {"rms_norm_eps": 0.02},
        ),
    ),
    "qwen3_next_by_three": Variant(
        "heads that three devices share, a dense layer, biases around attention, three taps; tied",
        _NEXT
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "attention_bias": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "intermediate_size": 90,
            "moe_intermediate_size": 42,
            "shared_expert_intermediate_size": 54,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": Variant(
        "what linear attention projects in four tensors, sections of rotary channels, dense MLPs",
        _DENSE,
        unlike=({"rms_norm_eps": 0.02}, {"rope_parameters": _MROPE | {"rope_theta": 100.0}}),
    ),
    "qwen3_5_moe": Variant(
        "experts in every layer, whose weights are always renormalised",
        _MOE,
        unlike=({"num_experts_per_tok": 2},),
    ),
    "qwen3_5_conditional": Variant("the language model of a multimodal one, tied by its wrapper", _wrapped(_DENSE)),
    "qwen3_5_moe_conditional": Variant("the same with experts", _wrapped(_MOE | {"vocab_size": 143})),
}
