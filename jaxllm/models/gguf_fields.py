"""What the metadata of a GGUF file must be, whatever its architecture; what is not read is not looked at."""

from __future__ import annotations

from jaxllm.models.hf_fields import CAP, COUNT, EPSILON, FACTOR, LAYERS, LENGTH, ORIGINAL_LENGTH, SIZE, THETA
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, FieldKinds, either, many, real, whole


def or_zero(kind: FieldKind, zero: FieldKind = whole(0, 0)) -> FieldKind:
    """A 0 is as good as absent, or says that the model has none."""
    return either(kind, zero)


GGUF_FIELDS: FieldKinds = {
    "block_count": LAYERS,
    "context_length": LENGTH,
    "embedding_length": SIZE,
    "embedding_length_per_layer_input": whole(0, 2**24),
    "feed_forward_length": SIZE,
    "attention.causal": FLAG,
    "attention.head_count": COUNT,
    "attention.head_count_kv": COUNT,
    "attention.key_length": or_zero(SIZE),
    "attention.value_length": SIZE,
    "attention.key_length_swa": SIZE,
    "attention.shared_kv_layers": whole(0, 2**10),
    "attention.key_length_mla": SIZE,
    "attention.value_length_mla": SIZE,
    "attention.layer_norm_epsilon": EPSILON,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "attention.sliding_window": or_zero(LENGTH),
    "attention.sliding_window_pattern": either(FLAG, LAYERS),
    "attention.scale": or_zero(FACTOR, real(0, 0)),
    "attention.temperature_scale": real(0, 1e3),
    "attention.max_alibi_bias": FACTOR,
    "attention.clamp_kqv": or_zero(FACTOR, real(0, 0)),
    "attention.kv_lora_rank": SIZE,
    "attention.q_lora_rank": or_zero(SIZE),
    "attn_logit_softcapping": CAP,
    "final_logit_softcapping": CAP,
    "embedding_scale": or_zero(FACTOR, real(0, 0)),
    "residual_scale": or_zero(FACTOR, real(0, 0)),
    "logit_scale": FACTOR,
    "rope.dimension_count": or_zero(SIZE),
    "rope.dimension_count_swa": SIZE,
    "rope.freq_base": THETA,
    "rope.freq_base_swa": THETA,
    "rope.scale_linear": or_zero(FACTOR, real(0, 0)),
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": or_zero(FACTOR, real(0, 0)),
    "rope.scaling.attn_factor": FACTOR,
    "rope.scaling.original_context_length": ORIGINAL_LENGTH,
    "rope.scaling.finetuned": FLAG,
    "rope.scaling.yarn_attn_factor": FieldKind("1", lambda value: value == 1 and not isinstance(value, bool)),
    "rope.scaling.yarn_ext_factor": real(-1e6, 1e6),
    "rope.scaling.yarn_beta_fast": FACTOR,
    "rope.scaling.yarn_beta_slow": FACTOR,
    "rope.scaling.yarn_log_multiplier": real(0, 1e2),
    "expert_count": or_zero(COUNT),
    "expert_used_count": or_zero(COUNT),
    "expert_group_count": or_zero(COUNT),
    "expert_group_used_count": or_zero(COUNT),
    "expert_shared_count": whole(0, 2**10),
    "expert_feed_forward_length": SIZE,
    "expert_shared_feed_forward_length": whole(0, 2**24),
    "moe_latent_size": or_zero(SIZE),
    "expert_gating_func": whole(0, 2**10),
    "expert_weights_norm": FLAG,
    "expert_weights_scale": real(-1e6, 1e6),
    "interleave_moe_layer_step": LAYERS,
    "nextn_predict_layers": whole(0, 2**10),
    "use_parallel_residual": FLAG,
    "leading_dense_block_count": whole(0, 2**10),
    "shortconv.l_cache": whole(2, 2**10),
    "full_attention_interval": LAYERS,
    "ssm.conv_kernel": whole(2, 2**10),
    "ssm.state_size": SIZE,
    "ssm.inner_size": SIZE,
    "ssm.time_step_rank": COUNT,
    "ssm.group_count": COUNT,
    "pooling_type": whole(0, 2**10),
    "classifier.output_labels": many(TEXT, 2**16),
}
"""By their names without the architecture's in front."""
