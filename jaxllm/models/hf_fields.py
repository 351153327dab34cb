"""The values that a config.json may have, whatever its family. Keys that are not read are not checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.weights.fields import (
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    FieldKind,
    FieldKinds,
    check_fields,
    either,
    many,
    one_of,
    real,
    several,
    shown,
    whole,
)
from jaxllm.weights.folder import EOS_FIELDS

SIZE = whole(1, 2**24)  # of a layer or a vocabulary
COUNT = whole(1, 2**16)  # of heads or experts
LAYERS = whole(1, 2**10)
LENGTH = whole(1, 2**31 - 1)  # in tokens: positions are 32-bit integers
ORIGINAL_LENGTH = whole(2, 2**31 - 1)  # its logarithm is divided by
EPSILON = real(0, 1)
THETA = real(1.001, 1e15)  # the base of rotary frequencies, whose logarithm is divided by
FACTOR = real(1e-3, 1e6)
CAP = real(1e-3, 1e9)
DIVISOR = real(1e-3, 1e31)  # what a rotary frequency is divided by; a huge one says that its channels do not rotate
DIVISORS = 2**16  # the most of them: one a pair of a head's channels
PATTERN = FieldKind(  # which layers have a window, L for local, and which have none
    "a text of L and G", lambda value: isinstance(value, str) and 0 < len(value) <= 2**10 and not value.strip("LG")
)
MAYBE_FLAG = either(FLAG, NULL)
OFF = FieldKind("false or null", lambda value: value is None or value is False)
LAYER_TYPES = ("full_attention", "sliding_attention")  # of most families


def maybe(kind: FieldKind) -> FieldKind:
    """Null is as good as absent, or says that the model has none."""
    return either(kind, NULL)


HF_FIELDS: FieldKinds = EOS_FIELDS | {
    **dict.fromkeys(("quantization_config", "rope_scaling", "rope_parameters", "per_layer_config"), maybe(OBJECT)),
    **dict.fromkeys((
        "vocab_size", "hidden_size", "intermediate_size", "n_embd", "global_head_dim", "vocab_size_per_layer_input",
        "moe_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
        "intermediate_size_mlp", "block_ff_dim", "block_multiple_of", "linear_key_head_dim", "linear_value_head_dim",
        "state_size", "mamba_d_state", "mamba_head_dim", "ssm_state_size", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    ), SIZE),
    **dict.fromkeys((
        "num_hidden_layers", "global_attn_every_n_layers", "n_layer", "_sliding_window_pattern", "decoder_sparse_step",
        "moe_layer_interval", "interleave_moe_layer_step", "full_attention_interval",
    ), LAYERS),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "n_shared_experts"), maybe(whole(0, 2**10))),
    **dict.fromkeys((
        "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias",
        "use_bias", "bias", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "is_causal",
        "use_bidirectional_attention", "norm_bias", "classifier_bias", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "rope_interleave", "use_sliding_window", "attention_k_eq_v",
        "attn_temperature_tuning", "use_double_wide_mlp", "norm_topk_prob", "enable_moe_block", "conv_bias",
        "tie_embedding", "block_auto_adjust_ff_dim", "use_conv_bias", "mamba_conv_bias", "mamba_proj_bias",
        "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias",
    ), MAYBE_FLAG),
    **dict.fromkeys((
        "hidden_act", "hidden_activation", "activation_function", "position_embedding_type", "mamba_hidden_act",
        "hybrid_override_pattern",
    ), maybe(TEXT)),
    **dict.fromkeys(("mlp_hidden_act", "topk_method"), TEXT),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), EPSILON),
    **dict.fromkeys((
        "num_attention_heads", "n_head", "num_experts", "n_routed_experts", "moe_num_experts", "moe_k",
        "linear_num_key_heads", "linear_num_value_heads", "num_heads", "n_groups", "mamba_n_heads", "mamba_n_groups",
        "mamba_num_heads",
    ), COUNT),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "n_group", "topk_group"), maybe(COUNT)),
    **dict.fromkeys((
        "head_dim", "n_inner", "rotary_dim", "moe_latent_size", "mamba_d_ssm", "q_lora_rank",
    ), maybe(SIZE)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), maybe(CAP)),
    **dict.fromkeys((
        "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
        "swiglu_alpha", "swiglu_limit",
    ), FACTOR),
    **dict.fromkeys((
        "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
        "ssm_in_multiplier", "ssm_out_multiplier",
    ), maybe(FACTOR)),
    **dict.fromkeys((
        "type_vocab_size", "moe_num_shared_experts", "moe_layer_start_index", "first_k_dense_replace",
        "num_dense_layers", "num_shared_experts",
    ), whole(0, 2**10)),
    **dict.fromkeys(("pad_token_id", "hidden_size_per_layer_input"), maybe(whole(0, 2**24))),
    **dict.fromkeys(("n_positions", "floor_scale"), LENGTH),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), maybe(real(1e-3, 1))),
    **dict.fromkeys(("rotary_emb_base", "rope_theta", "local_rope_theta"), maybe(THETA)),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "attention_chunk_size"), maybe(LENGTH)),
    **dict.fromkeys(("rope_local_base_freq", "global_rope_theta"), THETA),
    **dict.fromkeys(("full_attn_idxs", "mlp_only_layers", "moe_layers"), maybe(many(whole(0, 2**10), 2**10))),
    **dict.fromkeys(("max_window_layers", "num_local_experts", "num_experts_per_tok"), whole(0, 2**16)),
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"), whole(2, 2**10)),
    **dict.fromkeys(("expand", "mamba_expand"), whole(1, 2**10)),
    "architectures": maybe(many(TEXT, 64)),
    "local_attention": whole(2, 2**24),
    "query_pre_attn_scalar": real(1e-6, 1e9),
    "mlp_multipliers": maybe(several(FACTOR, 2)),
    "ssm_multipliers": maybe(several(FACTOR, 5)),
    "classifier_pooling": one_of("cls", "mean"),
    "classifier_activation": one_of("gelu", "relu", "silu", "tanh"),
    "add_cross_attention": OFF,
    "original_max_position_embeddings": maybe(ORIGINAL_LENGTH),
    "no_rope_layers": maybe(many(whole(0, 1), 2**10)),
    "no_rope_layer_interval": maybe(LAYERS),
    "sliding_window": either(LENGTH, whole(0, 0), NULL),
    "sliding_window_pattern": either(LAYERS, whole(0, 0), PATTERN, NULL),
    "attn_scale": real(0, 1e3),
    "shared_expert_intermediate_size": whole(0, 2**24),
    "mlp_layer_types": maybe(many(one_of("dense", "sparse"), 2**10)),
    "routed_scaling_factor": real(-1e6, 1e6),
    "moe_layer_end_index": whole(-1, 2**10),
    "moe_norm_min": real(0, 1e-6),
    "use_expert_bias": FLAG,
    "block_ffn_dim_multiplier": maybe(real(1e-3, 1e3)),
    "time_step_limit": maybe(FieldKind("a list of two numbers", lambda value: isinstance(value, list))),
    "mamba_d_head": either(SIZE, one_of("auto")),
}  # fmt: skip

ROPE_FIELDS: FieldKinds = {
    **dict.fromkeys(("rope_type", "type"), maybe(TEXT)),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow", "alpha"), maybe(FACTOR)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), maybe(real(0, 1e3))),
    **dict.fromkeys(("short_factor", "long_factor"), many(FACTOR, DIVISORS)),
    "rope_theta": maybe(THETA),
    "original_max_position_embeddings": maybe(ORIGINAL_LENGTH),
    "partial_rotary_factor": maybe(real(1e-3, 1)),
    "truncate": FLAG,
    "mrope_section": maybe(several(whole(0, 2**16), 3)),
    "mrope_interleaved": MAYBE_FLAG,
    "attn_factor": maybe(FACTOR),  # of GGUF files, as are divisors
    "divisors": maybe(many(DIVISOR, DIVISORS)),
}  # fmt: skip
"""Of `rope_scaling` and `rope_parameters`, or of the entries that the latter has for each type of layer."""


def check_hf(c: dict[str, Any], layer_types: Sequence[str] = LAYER_TYPES, fields: FieldKinds | None = None) -> None:
    """Raises CheckpointError for the first value of a config.json (or its `text_config`) that cannot be meant.

    `layer_types` are those of its family, and `fields` what it takes other values for.
    """
    kinds = maybe(many(one_of(*layer_types), 2**10))
    check_fields(c, HF_FIELDS | {"layer_types": kinds, "layers_block_type": kinds} | (fields or {}))
    for name in ("rope_scaling", "rope_parameters"):
        given = c.get(name) or {}
        check_fields(given, ROPE_FIELDS, f"{name}.")
        check_fields(given, dict.fromkeys(LAYER_TYPES, maybe(OBJECT)), f"{name}.")
        for kind in LAYER_TYPES:
            check_fields(given.get(kind) or {}, ROPE_FIELDS, f"{name}.{kind}.")
    layers = c.get("num_hidden_layers")
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if layers and c.get(name) and len(c[name]) != layers:
            raise CheckpointError(f"{name} has {len(c[name])} entries; accepted is one for each of {layers} layers")


def check_only(c: dict[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises CheckpointError where a key has another value than the accepted ones, of which it names the last."""
    for key, accepted in only.items():
        if c.get(key) not in accepted:
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {shown(accepted[-1])}")
