"""Mistral, Ministral, Mistral 3 and Ministral 3 (with and without their multimodal wrapper), and Mixtral."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import MODEL_LANGUAGE_MODEL, Variant, without

_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 133,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.6,
}

_MSCALE = _YARN | {"rope_theta": 10000.0, "beta_fast": 1.0, "beta_slow": 0.25, "mscale": 1.5, "mscale_all_dim": 0.5}

_MINISTRAL3 = without(_MISTRAL, "rope_theta") | {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "vocab_size": 135,
    "head_dim": 24,
    "rope_parameters": _YARN,
}

_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
    "rope_theta": 10000.0,
}


def _wrapped(text: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "vision_config": _PIXTRAL,
        "text_config": without(text, "architectures", "tie_word_embeddings"),
        "torch_dtype": "float32",
        **config,
    }


_MIXTRAL = without(_MISTRAL, "rope_theta") | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 137,
    "hidden_size": 80,
    "intermediate_size": 104,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

VARIANTS: dict[str, Variant] = {
    "mistral_window": Variant(
        "a window on every layer, shorter than the prompt; no head_dim",
        _MISTRAL | {"sliding_window": 13},
        unlike=({"sliding_window": None}, {"sliding_window": 14}, {"sliding_window": 12}),
    ),
    "mistral_nemo": Variant(
        "head_dim is not hidden_size / num_attention_heads; a null window",
        _MISTRAL | {"head_dim": 24, "rope_theta": 1000000.0},
        unlike=({"sliding_window": 32},),
    ),
    "ministral": Variant(
        "a window on the layers that layer_types names",
        _MISTRAL
        | {
            "architectures": ["MinistralForCausalLM"],
            "model_type": "ministral",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        unlike=({"layer_types": ["sliding_attention"] * 4}, {"layer_types": ["full_attention"] * 4}),
    ),
    "mistral3": Variant(
        "a multimodal checkpoint as first published: text_config, names under language_model.model, and a head of its "
        "own though no key says that it is not tied",
        _wrapped(_MISTRAL | {"head_dim": 24, "rope_theta": 1000000000.0}),
        saved_as={"tie_word_embeddings": False},
    ),
    "mistral3_renamed": Variant(
        "a multimodal checkpoint with names under model.language_model, rope nested in text_config",
        _wrapped(
            without(_MISTRAL, "rope_theta")
            | {"head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
            tie_word_embeddings=False,
        ),
        renamed=MODEL_LANGUAGE_MODEL,
    ),
    "ministral3": Variant(
        "yarn in rope_parameters, and queries that grow past the original context; tied",
        _wrapped(_MINISTRAL3, tie_word_embeddings=True),
        unlike=(
            {"text_config": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.0}}},
            {"text_config": {"rope_parameters": _YARN | {"original_max_position_embeddings": 17}}},
        ),
    ),
    "ministral3_text": Variant(
        "Ministral 3 without the multimodal wrapper, with a window; mscale moves the rotary part",
        _MINISTRAL3 | {"sliding_window": 21, "rope_parameters": _MSCALE},
        unlike=(
            {"rope_parameters": _MSCALE | {"llama_4_scaling_beta": 0.0}},
            {"rope_parameters": _MSCALE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_parameters": _MSCALE | {"beta_fast": 32.0}},
            {"rope_parameters": _MSCALE | {"beta_slow": 0.9}},
            {"sliding_window": None},
        ),
    ),
    "ministral3_older_rope": Variant(
        "yarn and the query scaling in the older spelling: rope_scaling, with rope_theta beside it",
        without(_MINISTRAL3, "rope_parameters") | {"rope_scaling": without(_MSCALE, "rope_theta"), "rope_theta": 5e5},
        unlike=(
            {"rope_scaling": None},
            {"rope_theta": 1e6},
            {"rope_scaling": without(_MSCALE, "rope_theta") | {"factor": 4.0}},
        ),
    ),
    "mixtral": Variant(
        "two of eight experts, weights renormalised; theta is the family's default; divides over 8 devices",
        _MIXTRAL,
        unlike=({"rope_theta": 10000.0}, {"num_experts_per_tok": 3}),
    ),
    "mixtral_window": Variant(
        "a window, grouped queries and a head_dim of its own",
        _MIXTRAL
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "intermediate_size": 76,
            "head_dim": 24,
            "sliding_window": 11,
            "rope_theta": 10000.0,
        },
        unlike=({"sliding_window": None}, {"sliding_window": 12}),
    ),
}
