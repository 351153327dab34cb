"""GGUF metadata of architectures with layers that keep a state of each sequence; see `gguf_keys.py`."""

from __future__ import annotations

from tests.reference.gguf_keys import Config, granite, rotated_part, shared


def lfm2(c: Config) -> Config:
    """KV heads in the layers that attend, none in those that convolve; the size of the MLP as it is."""
    layers = [c["num_key_value_heads"] if kind == "full_attention" else 0 for kind in c["layer_types"]]
    size = c["intermediate_size"]
    if c.get("block_auto_adjust_ff_dim"):
        unit = c["block_multiple_of"]
        size = -(-int(c["block_ffn_dim_multiplier"] * int(2 * size / 3)) // unit) * unit
    keys = shared(c | {"rms_norm_eps": c["norm_eps"], "intermediate_size": size}) | {
        "attention.head_count_kv": layers,
        "vocab_size": c["vocab_size"],
        "shortconv.l_cache": c["conv_L_cache"],
    }
    if "num_experts" not in c:
        return keys
    return keys | {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "leading_dense_block_count": c["num_dense_layers"],
        "expert_gating_func": 2,
    }


def qwen_delta(c: Config) -> Config:
    """How often a layer has full attention is stored, not which layers do."""
    return shared(c | {"intermediate_size": c.get("intermediate_size")}) | {
        "full_attention_interval": c["layer_types"].index("full_attention") + 1,
        "rope.dimension_count": int(c["head_dim"] * rotated_part(c)),
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }


def qwen3_5(c: Config) -> Config:
    """The sections of the rotary channels as well; of the dense models there is a layer that predicts a token more."""
    keys = qwen_delta(c) | {"rope.dimension_sections": [*c["rope_parameters"]["mrope_section"], 0]}
    if "num_experts" in c:
        return keys
    return keys | {"block_count": c["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def mamba2(c: Config) -> Config:
    """A length that says nothing, and sizes of what there is not."""
    return {
        "context_length": 2**20,
        "embedding_length": c["hidden_size"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": c["num_hidden_layers"],
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.inner_size": c["expand"] * c["hidden_size"],
        "ssm.state_size": c["state_size"],
        "ssm.time_step_rank": c["num_heads"],
        "ssm.group_count": c["n_groups"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
    }


def granite_hybrid(c: Config) -> Config:
    """KV heads in the layers that attend, none in the others; the key that switches rotary embeddings off."""
    rotated = c["position_embedding_type"] == "rope"
    attending = ("attention", "full_attention")
    return granite(c) | {
        "attention.head_count_kv": [c["num_key_value_heads"] if kind in attending else 0 for kind in c["layer_types"]],
        "context_length": c["max_position_embeddings"] if rotated else 2**20,
        "rope.scaling.finetuned": rotated,
        "expert_shared_feed_forward_length": c["shared_intermediate_size"],
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.group_count": c["mamba_n_groups"],
        "ssm.inner_size": c["mamba_expand"] * c["hidden_size"],
        "ssm.time_step_rank": c["mamba_n_heads"],
    }


def falcon_h1(c: Config) -> Config:
    return {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "block_count": c["num_hidden_layers"],
        "vocab_size": c["vocab_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c["rope_parameters"]["rope_theta"],
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.inner_size": c["mamba_d_ssm"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.time_step_rank": c["mamba_n_heads"],
        "ssm.group_count": c["mamba_n_groups"],
    }


def nemotron_h(c: Config) -> Config:
    """KV heads in the layers that attend, sizes in those that are MLPs or have experts, neither in the others."""
    kinds, size = c["layers_block_type"], c["intermediate_size"]
    heads = [c["num_key_value_heads"] if kind in ("attention", "full_attention") else 0 for kind in kinds]
    keys = {
        "context_length": 2**20,
        "embedding_length": c["hidden_size"],
        "block_count": len(kinds),
        "vocab_size": c["vocab_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": heads,
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "ssm.group_count": c["n_groups"],
    }
    if "moe" not in kinds:
        return keys | {"feed_forward_length": [size if kind == "mlp" else 0 for kind in kinds]}
    return keys | {
        "feed_forward_length": [c["moe_intermediate_size"] if kind == "moe" else 0 for kind in kinds],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_count": c["n_routed_experts"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_group_count": c["n_group"],
        "moe_latent_size": c["moe_latent_size"],
    }
