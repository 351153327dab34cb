"""GGUF metadata of each architecture, as llama.cpp's conversion package writes it.

Functions take config.json's content with transformers' defaults filled in. Keys lack the architecture's name in front;
those whose value is None are not stored.
"""

from __future__ import annotations

import math
from typing import Any

Config = dict[str, Any]


def shared(c: Config) -> Config:
    """Keys that most architectures store."""
    ropes = c["rope_parameters"] or {}
    rope = ropes.get("full_attention", ropes)
    head_dim = c.get("head_dim")
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": _float(rope.get("rope_theta")),
        "rope.freq_base_swa": _float(ropes.get("sliding_attention", {}).get("rope_theta")),
        "expert_count": c.get("num_local_experts") or c.get("num_experts"),
        "expert_used_count": c.get("num_experts_per_tok"),
        "expert_group_count": c.get("n_group"),
        "expert_group_used_count": c.get("topk_group"),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}.get(c.get("scoring_func", "")),
    }
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    elif rope.get("rope_type") == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{beta}": _float(rope.get(beta)) for beta in ("beta_fast", "beta_slow")}
    return keys


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def llama(c: Config) -> Config:
    keys = shared(c)
    head_dim = keys["attention.key_length"] or c["hidden_size"] // c["num_attention_heads"]
    return keys | {"vocab_size": c["vocab_size"], "rope.dimension_count": head_dim}


def mistral3(c: Config) -> Config:
    if c["model_type"] != "ministral3":
        return llama(c)
    rope = c["rope_parameters"]
    return llama(c) | {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def phi2(c: Config) -> Config:
    heads, size = c["num_attention_heads"], c["hidden_size"]
    return {
        "context_length": c["max_position_embeddings"],
        "embedding_length": size,
        "feed_forward_length": 4 * size,
        "block_count": c["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": c["layer_norm_eps"],
        "rope.dimension_count": int(rotated_part(c) * size) // heads,
    }


def phi3(c: Config) -> Config:
    """Whether rope is scaled shows only in the tensors of factors."""
    original, longest = _phi3_original(c), c["max_position_embeddings"]
    keys = {
        "context_length": longest,
        "rope.scaling.original_context_length": original,
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "block_count": c["num_hidden_layers"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.dimension_count": int(rotated_part(c) * c["hidden_size"]) // c["num_attention_heads"],
        "rope.freq_base": c["rope_parameters"]["rope_theta"],
        "attention.sliding_window": c["sliding_window"] or 0,
    }
    if c["rope_parameters"].get("long_factor"):
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(longest / original) / math.log(original))
    return keys


def _phi3_original(c: Config) -> int:
    return c["rope_parameters"].get("original_max_position_embeddings") or c["original_max_position_embeddings"]


def rotated_part(c: Config) -> float:
    return c["rope_parameters"].get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0


def qwen2moe(c: Config) -> Config:
    return shared(c) | {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }


def stablelm(c: Config) -> Config:
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    return {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "feed_forward_length": c["intermediate_size"],
        "rope.dimension_count": int(rotated_part(c) * head_dim),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "use_parallel_residual": c["use_parallel_residual"],
        "attention.layer_norm_epsilon": c["layer_norm_eps"],
    }


def gemma(c: Config) -> Config:
    keys = shared(c)
    return {key: value for key, value in keys.items() if not key.startswith("rope.")}


def gemma2(c: Config) -> Config:
    return gemma(c) | {
        "attn_logit_softcapping": c["attn_logit_softcapping"],
        "final_logit_softcapping": c["final_logit_softcapping"],
        "attention.sliding_window": c["sliding_window"],
    }


def gemma3(c: Config) -> Config:
    return shared(c) | {"attention.sliding_window": c["sliding_window"]}


def deepseek2(c: Config) -> Config:
    """The lengths of a head are those of the one cached head, the latent; the real ones are stored beside them."""
    latent, rotary = c["kv_lora_rank"], c["qk_rope_head_dim"]
    multiplier = (c["rope_parameters"] or {}).get("mscale_all_dim")
    return shared(c) | {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "vocab_size": c["vocab_size"],
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotary,
        "attention.value_length": latent,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": c["v_head_dim"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_count": c["n_routed_experts"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": _float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"] or None,
        "rope.dimension_count": rotary,
        "rope.scaling.yarn_log_multiplier": 0.1 * multiplier if multiplier else None,
    }


def llama4(c: Config) -> Config:
    """How large chunks are, and how queries grow, is not stored; a window of 0 says that there are neither."""
    every = all(kind == "full_attention" for kind in c["layer_types"])
    return llama(c | {"intermediate_size": c["intermediate_size_mlp"]}) | {
        "interleave_moe_layer_step": c["interleave_moe_layer_step"],
        "expert_feed_forward_length": c["intermediate_size"],
        "attention.sliding_window": 0 if every else None,
    }


def gemma4(c: Config) -> Config:
    """Sizes that differ from layer to layer are lists. Heads are those of layers without a window, but for `swa`."""
    number, shared_layers = c["num_hidden_layers"], c["num_kv_shared_layers"]
    changes = {int(index): change for index, change in (c.get("per_layer_config") or {}).items()}
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    head_dim = changes[slides.index(False)]["head_dim"]
    kv_heads = [changes.get(i, {}).get("num_key_value_heads", c["num_key_value_heads"]) for i in range(number)]
    doubled = [i >= number - shared_layers and c["use_double_wide_mlp"] for i in range(number)]
    return shared(c) | {
        "attention.shared_kv_layers": shared_layers,
        "embedding_length_per_layer_input": c.get("hidden_size_per_layer_input", 0),
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": [c["intermediate_size"] * (2 if wide else 1) for wide in doubled],
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "expert_used_count": c.get("top_k_experts"),
        "final_logit_softcapping": c["final_logit_softcapping"],
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": c["head_dim"],
    }


def glm4(c: Config) -> Config:
    return shared(c) | {"rope.dimension_count": int(c["head_dim"] * rotated_part(c))}


def windowed(c: Config) -> Config:
    """A flag for each layer that has a window, and no keys where none may."""
    if not c.get("sliding_window"):
        return shared(c)
    flags = [kind == "sliding_attention" for kind in c["layer_types"]]
    return shared(c) | {"attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": flags}


def exaone4(c: Config) -> Config:
    return windowed(c) | {"vocab_size": c["vocab_size"]}


def with_layer_norm(c: Config) -> Config:
    epsilon = c.get("layer_norm_eps") or c.get("norm_epsilon")
    return shared(c | {"rms_norm_eps": None}) | {"attention.layer_norm_epsilon": epsilon}


def cohere(c: Config) -> Config:
    return with_layer_norm(c) | {"logit_scale": c["logit_scale"], "rope.scaling.type": "none"}


def cohere2(c: Config) -> Config:
    """Which layers have no window is not stored: every fourth."""
    return cohere(c) | {
        "attention.sliding_window": c["sliding_window"],
        "vocab_size": c["vocab_size"],
        "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
    }


def encoder(c: Config) -> Config:
    """Of those with LayerNorms."""
    keys = with_layer_norm(
        c | {"num_key_value_heads": c["num_attention_heads"], "rope_parameters": c.get("rope_parameters")}
    )
    return keys | {"attention.causal": False, "pooling_type": 1}


def modern_bert(c: Config) -> Config:
    ropes = c["rope_parameters"]
    return encoder(c | {"layer_norm_eps": c["norm_eps"]}) | {
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "none",
        "attention.sliding_window": c["local_attention"],
        "attention.sliding_window_pattern": c.get("global_attn_every_n_layers", 3),
        "vocab_size": c["vocab_size"],
    }


def gemma_embedding(c: Config) -> Config:
    return gemma3(c) | {"attention.causal": False, "pooling_type": 1}


def granite(c: Config) -> Config:
    scales = {
        "attention.scale": c["attention_multiplier"],
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "logit_scale": c["logits_scaling"],
    }
    return llama(c) | {key: float(scale) for key, scale in scales.items()}


def ernie4_5_moe(c: Config) -> Config:
    return shared(c) | {
        "expert_count": c["moe_num_experts"],
        "expert_used_count": c["moe_k"],
        "interleave_moe_layer_step": c["moe_layer_interval"],
        "leading_dense_block_count": c["moe_layer_start_index"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": c["intermediate_size"] // c["num_key_value_heads"],
    }


def hunyuan(c: Config) -> Config:
    """The stretched base takes the place of the other, and of the scaling."""
    rope, keys = c["rope_parameters"], shared(c)
    if rope.get("rope_type") != "dynamic":
        return keys
    size = c["head_dim"]
    return keys | {
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }


def hunyuan_moe(c: Config) -> Config:
    size = c["intermediate_size"]
    return hunyuan(c) | {
        "expert_used_count": c["moe_topk"],
        "expert_feed_forward_length": size,
        "expert_shared_feed_forward_length": size,
        "expert_shared_count": 1,
    }


def gpt2(c: Config) -> Config:
    return {
        "block_count": c["n_layer"],
        "context_length": c["n_positions"],
        "embedding_length": c["n_embd"],
        "feed_forward_length": 4 * c["n_embd"],
        "attention.head_count": c["n_head"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
    }


def bloom(c: Config) -> Config:
    """As many tokens of context as channels, where the config does not say."""
    return {
        "context_length": c.get("seq_length", c["hidden_size"]),
        "embedding_length": c["hidden_size"],
        "feed_forward_length": 4 * c["hidden_size"],
        "block_count": c["n_layer"],
        "attention.head_count": c["n_head"],
        "attention.head_count_kv": c["n_head"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
    }


def mpt(c: Config) -> Config:
    return {
        "context_length": c["max_seq_len"],
        "embedding_length": c["d_model"],
        "block_count": c["n_layers"],
        "feed_forward_length": 4 * c["d_model"],
        "attention.head_count": c["n_heads"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.clamp_kqv": _float(c["attn_config"]["clip_qkv"]),
        "attention.max_alibi_bias": float(c["attn_config"]["alibi_bias_max"]),
    }


def gptneox(c: Config) -> Config:
    return {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "feed_forward_length": c["intermediate_size"],
        "rope.dimension_count": int(rotated_part(c) * (c["hidden_size"] // c["num_attention_heads"])),
        "attention.head_count": c["num_attention_heads"],
        "use_parallel_residual": c["use_parallel_residual"],
        "attention.layer_norm_epsilon": c["layer_norm_eps"],
    }


def gpt_oss(c: Config) -> Config:
    """Which layers have a window is not stored: every other one. Nor is it what the gate is."""
    return shared(c) | {
        "attention.sliding_window": c["sliding_window"],
        "expert_feed_forward_length": c["intermediate_size"],
    }


def glm4_moe(c: Config) -> Config:
    """The layer that predicts a further token counts."""
    further = c["num_nextn_predict_layers"]
    return shared(c) | {
        "block_count": c["num_hidden_layers"] + further,
        "nextn_predict_layers": further,
        "rope.dimension_count": int(c["head_dim"] * rotated_part(c)),
        "expert_count": c["n_routed_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": _float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
    }


def minimax_m2(c: Config) -> Config:
    return shared(c) | {
        "expert_feed_forward_length": c["intermediate_size"],
        "rope.dimension_count": c["rotary_dim"],
    }


def glm4_moe_lite(c: Config) -> Config:
    """DeepSeek's, whose scores are not stored."""
    dense = c["mlp_layer_types"].index("sparse")
    return deepseek2(c | {"first_k_dense_replace": dense}) | {"expert_gating_func": None}
