"""What the values of a config.json must be, whatever its family; what is not read is not looked at."""

from __future__ import annotations

from collections.abc import Sequence
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
    whole,
)
from jaxllm.weights.folder import EOS_FIELDS

SIZE = whole(1, 2**24)
"""Of a layer or a vocabulary."""
COUNT = whole(1, 2**16)
"""Of heads or experts."""
LAYERS = whole(1, 2**10)
LENGTH = whole(1, 2**31 - 1)
"""In tokens: positions are 32-bit integers."""
ORIGINAL_LENGTH = whole(2, 2**31 - 1)
"""Its logarithm is divided by."""
EPSILON = real(0, 1)
THETA = real(1.001, 1e15)
"""The base of rotary frequencies, whose logarithm is divided by."""
FACTOR = real(1e-3, 1e6)
CAP = real(1e-3, 1e9)
DIVISOR = real(1e-3, 1e31)
"""What a rotary frequency is divided by; a huge one says that its channels do not rotate."""
DIVISORS = 2**16
"""The most of them: one a pair of a head's channels."""
PATTERN = FieldKind(
    "a text of L and G", lambda value: isinstance(value, str) and 0 < len(value) <= 2**10 and not value.strip("LG")
)
"""Which layers have a window, L for local, and which have none."""
MAYBE_FLAG = either(FLAG, NULL)
OFF = FieldKind("false or null", lambda value: value is None or value is False)
BIDIRECTIONAL = ("is_causal", False), ("use_bidirectional_attention", True)
"""What says that attention sees later tokens."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Of most families."""


def maybe(kind: FieldKind) -> FieldKind:
    """Null is as good as absent, or says that the model has none."""
    return either(kind, NULL)


HF_FIELDS: FieldKinds = EOS_FIELDS | {
    "architectures": maybe(many(TEXT, 64)),
    "quantization_config": maybe(OBJECT),
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": maybe(whole(0, 2**10)),
    "tie_word_embeddings": MAYBE_FLAG,
    "hidden_act": maybe(TEXT),
    "hidden_activation": maybe(TEXT),
    "mlp_hidden_act": TEXT,
    "rms_norm_eps": EPSILON,
    "layer_norm_eps": EPSILON,
    "norm_eps": EPSILON,
    "norm_epsilon": EPSILON,
    "layer_norm_epsilon": EPSILON,
    # attention
    "num_attention_heads": COUNT,
    "num_key_value_heads": maybe(COUNT),
    "head_dim": maybe(SIZE),
    "attention_bias": MAYBE_FLAG,
    "mlp_bias": MAYBE_FLAG,
    "qkv_bias": MAYBE_FLAG,
    "use_qkv_bias": MAYBE_FLAG,
    "attention_out_bias": MAYBE_FLAG,
    "use_bias": MAYBE_FLAG,
    "bias": MAYBE_FLAG,
    "use_qk_norm": MAYBE_FLAG,
    "qk_layernorm": MAYBE_FLAG,
    "use_parallel_residual": MAYBE_FLAG,
    "is_causal": MAYBE_FLAG,
    "use_bidirectional_attention": MAYBE_FLAG,
    "local_attention": whole(2, 2**24),
    "global_attn_every_n_layers": LAYERS,
    "query_pre_attn_scalar": real(1e-6, 1e9),
    "attn_logit_softcapping": maybe(CAP),
    "final_logit_softcapping": maybe(CAP),
    "attention_multiplier": FACTOR,
    "embedding_multiplier": FACTOR,
    "residual_multiplier": FACTOR,
    "logits_scaling": FACTOR,
    "logit_scale": FACTOR,
    **dict.fromkeys(
        (
            "lm_head_multiplier",
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        ),
        maybe(FACTOR),
    ),
    "mlp_multipliers": maybe(several(FACTOR, 2)),
    "ssm_multipliers": maybe(several(FACTOR, 5)),
    # encoders
    "type_vocab_size": whole(0, 2**10),
    "pad_token_id": maybe(whole(0, 2**24)),
    "norm_bias": MAYBE_FLAG,
    "classifier_bias": MAYBE_FLAG,
    "classifier_pooling": one_of("cls", "mean"),
    "classifier_activation": one_of("gelu", "relu", "silu", "tanh"),
    # GPT-2 and GPT-NeoX
    "n_embd": SIZE,
    "n_head": COUNT,
    "n_layer": LAYERS,
    "n_positions": LENGTH,
    "n_inner": maybe(SIZE),
    "activation_function": maybe(TEXT),
    "scale_attn_weights": MAYBE_FLAG,
    "scale_attn_by_inverse_layer_idx": MAYBE_FLAG,
    "add_cross_attention": OFF,
    "rotary_pct": maybe(real(1e-3, 1)),
    "rotary_emb_base": maybe(THETA),
    # positions and windows
    "max_position_embeddings": maybe(LENGTH),
    "model_max_length": maybe(LENGTH),
    "original_max_position_embeddings": maybe(ORIGINAL_LENGTH),
    "rope_theta": maybe(THETA),
    "rope_local_base_freq": THETA,
    "global_rope_theta": THETA,
    "local_rope_theta": maybe(THETA),
    "rope_interleave": MAYBE_FLAG,
    "rope_scaling": maybe(OBJECT),
    "rope_parameters": maybe(OBJECT),
    "partial_rotary_factor": maybe(real(1e-3, 1)),
    "position_embedding_type": maybe(TEXT),
    "rotary_dim": maybe(SIZE),
    "no_rope_layers": maybe(many(whole(0, 1), 2**10)),
    "no_rope_layer_interval": maybe(LAYERS),
    "full_attn_idxs": maybe(many(whole(0, 2**10), 2**10)),
    "sliding_window": either(LENGTH, whole(0, 0), NULL),
    "use_sliding_window": MAYBE_FLAG,
    "sliding_window_pattern": either(LAYERS, PATTERN, NULL),
    "_sliding_window_pattern": LAYERS,
    "max_window_layers": whole(0, 2**16),
    "global_head_dim": SIZE,
    "num_global_key_value_heads": maybe(COUNT),
    "attention_k_eq_v": MAYBE_FLAG,
    "num_kv_shared_layers": maybe(whole(0, 2**10)),
    "per_layer_config": maybe(OBJECT),
    "attention_chunk_size": maybe(LENGTH),
    "attn_temperature_tuning": MAYBE_FLAG,
    "attn_scale": real(0, 1e3),
    "floor_scale": LENGTH,
    # inputs of single layers
    "hidden_size_per_layer_input": maybe(whole(0, 2**24)),
    "vocab_size_per_layer_input": SIZE,
    "use_double_wide_mlp": MAYBE_FLAG,
    # experts
    "num_experts": COUNT,
    "num_local_experts": whole(0, 2**16),
    "num_experts_per_tok": whole(0, 2**16),
    "moe_intermediate_size": SIZE,
    "shared_expert_intermediate_size": whole(0, 2**24),
    "shared_intermediate_size": SIZE,
    "norm_topk_prob": MAYBE_FLAG,
    "mlp_layer_types": maybe(many(one_of("dense", "sparse"), 2**10)),
    "decoder_sparse_step": LAYERS,
    "mlp_only_layers": maybe(many(whole(0, 2**10), 2**10)),
    "n_routed_experts": COUNT,
    "moe_shared_expert_intermediate_size": SIZE,
    "moe_latent_size": maybe(SIZE),
    "n_shared_experts": maybe(whole(0, 2**10)),
    "n_group": maybe(COUNT),
    "topk_group": maybe(COUNT),
    "topk_method": TEXT,
    "routed_scaling_factor": real(-1e6, 1e6),
    "moe_num_experts": COUNT,
    "moe_k": COUNT,
    "moe_num_shared_experts": whole(0, 2**10),
    "moe_layer_start_index": whole(0, 2**10),
    "moe_layer_end_index": whole(-1, 2**10),
    "moe_layer_interval": LAYERS,
    "moe_norm_min": real(0, 1e-6),
    "enable_moe_block": MAYBE_FLAG,
    "intermediate_size_mlp": SIZE,
    "interleave_moe_layer_step": LAYERS,
    "moe_layers": maybe(many(whole(0, 2**10), 2**10)),
    "swiglu_alpha": FACTOR,
    "swiglu_limit": FACTOR,
    "first_k_dense_replace": whole(0, 2**10),
    "num_dense_layers": whole(0, 2**10),
    "use_expert_bias": FLAG,
    # convolutions
    "conv_L_cache": whole(2, 2**10),
    "conv_bias": MAYBE_FLAG,
    "linear_conv_kernel_dim": whole(2, 2**10),
    "tie_embedding": MAYBE_FLAG,
    "block_ff_dim": SIZE,
    "block_auto_adjust_ff_dim": MAYBE_FLAG,
    "block_multiple_of": SIZE,
    "block_ffn_dim_multiplier": maybe(real(1e-3, 1e3)),
    # linear attention
    "full_attention_interval": LAYERS,
    "linear_num_key_heads": COUNT,
    "linear_num_value_heads": COUNT,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    # state-space layers
    "num_heads": COUNT,
    "state_size": SIZE,
    "n_groups": COUNT,
    "conv_kernel": whole(2, 2**10),
    "expand": whole(1, 2**10),
    "use_conv_bias": MAYBE_FLAG,
    "time_step_limit": maybe(FieldKind("a list of two numbers", lambda value: isinstance(value, list))),
    "mamba_n_heads": COUNT,
    "mamba_d_head": either(SIZE, one_of("auto")),
    "mamba_d_state": SIZE,
    "mamba_n_groups": COUNT,
    "mamba_d_conv": whole(2, 2**10),
    "mamba_expand": whole(1, 2**10),
    "mamba_conv_bias": MAYBE_FLAG,
    "mamba_proj_bias": MAYBE_FLAG,
    "mamba_d_ssm": maybe(SIZE),
    "mamba_rms_norm": MAYBE_FLAG,
    "mamba_norm_before_gate": MAYBE_FLAG,
    "projectors_bias": MAYBE_FLAG,
    "mamba_num_heads": COUNT,
    "mamba_head_dim": SIZE,
    "ssm_state_size": SIZE,
    "mamba_hidden_act": maybe(TEXT),
    "hybrid_override_pattern": maybe(TEXT),
    # latent attention
    "kv_lora_rank": SIZE,
    "q_lora_rank": maybe(SIZE),
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
}

ROPE_FIELDS: FieldKinds = {
    "rope_type": maybe(TEXT),
    "type": maybe(TEXT),
    "rope_theta": maybe(THETA),
    "factor": maybe(FACTOR),
    "original_max_position_embeddings": maybe(ORIGINAL_LENGTH),
    "partial_rotary_factor": maybe(real(1e-3, 1)),
    "attention_factor": maybe(FACTOR),
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "beta_fast": maybe(FACTOR),
    "beta_slow": maybe(FACTOR),
    "truncate": FLAG,
    "alpha": maybe(FACTOR),
    "mscale": maybe(real(0, 1e3)),
    "mscale_all_dim": maybe(real(0, 1e3)),
    "short_factor": many(FACTOR, DIVISORS),
    "long_factor": many(FACTOR, DIVISORS),
    "attn_factor": maybe(FACTOR),  # of GGUF files, as are divisors
    "divisors": maybe(many(DIVISOR, DIVISORS)),
    "llama_4_scaling_beta": maybe(real(0, 1e3)),
}
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
        if c.get(name) and len(c[name]) != layers:
            raise CheckpointError(f"{name} has {len(c[name])} entries; accepted is one for each of {layers} layers")
