"""Families that are others' parts put together anew: one model of each class."""

from __future__ import annotations

from typing import Any

from tests.reference.tiny_configs.variant import Variant

_SIZES: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = _SIZES | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2, "head_dim": 16,
}  # fmt: skip
_ROUTED: dict[str, Any] = _SIZES | {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 14, "qk_rope_head_dim": 10, "v_head_dim": 18}
_LATENT |= {"num_key_value_heads": 4}
_GPT: dict[str, Any] = {
    "vocab_size": 41, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 96, "bos_token_id": 0, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip
_WINDOW = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
_SCALES = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 0.7,
}  # fmt: skip


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _of(kind: str, name: str, isolates: str, *parts: dict[str, Any], **more: Any) -> Variant:
    config: dict[str, Any] = {"architectures": [name], "model_type": kind}
    for part in parts:
        config |= part
    return Variant(isolates, config, **more)


_PLAIN = _without(_SIZES, "num_key_value_heads")
_WIDE = _without(_PLAIN, "intermediate_size")
VARIANTS: dict[str, Variant] = {
    "exaone": _of(
        "exaone", "ExaoneForCausalLM", "Llama under GPT-2's names",
        _SIZES,
    ),
    "iquestcoder": _of("iquestcoder", "IQuestCoderForCausalLM", "Llama by another name", _SIZES, {"head_dim": 16}),
    "emu3": _of("emu3_text_model", "Emu3ForCausalLM", "Llama within a model of images", _SIZES, {"rope_theta": 1e6}),
    "apertus1p5": _of("apertus1p5_text", "Apertus1p5TextForCausalLM", "Apertus within a model of images", _SIZES),
    "cwm": _of("cwm", "CwmForCausalLM", "every fourth layer without a window, the first", _SIZES, {
        "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 5,
    }, unlike=({"sliding_window": 10}, {"rope_theta": 100.0, "rope_parameters": {"rope_type": "default"}})),
    "arcee": _of("arcee", "ArceeForCausalLM", "an MLP with a squared ReLU", _SIZES, unlike=({"hidden_act": "relu"},)),
    "jais2": _of("jais2", "Jais2ForCausalLM", "LayerNorm and biases around a squared ReLU", _SIZES),
    "nemotron": _of("nemotron", "NemotronForCausalLM", "LayerNorms that 1 is added to", _SIZES, {
        "partial_rotary_factor": 0.5, "norm_eps": 1e-5,
    }, seed=1),
    "helium": _of("helium", "HeliumForCausalLM", "Llama with pairs of neighbours", _SIZES, {"head_dim": 12}),
    "hyperclovax": _of(
        "hyperclovax", "HyperCLOVAXForCausalLM", "Granite's factors between norms", _SIZES, _SCALES,
        unlike=({"logits_scaling": 0.8}, {"residual_multiplier": 0.7}),
    ),
    "vaultgemma": _of("vaultgemma", "VaultGemmaForCausalLM", "Gemma 2 with two norms a layer", _SIZES, {
        "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "hidden_activation": "gelu_pytorch_tanh",
    }),
    "olmo": _of("olmo", "OlmoForCausalLM", "LayerNorms without weights, clipped keys", _SIZES, {"clip_qkv": 1.5},
                unlike=({"clip_qkv": None},)),
    "nanochat": _of("nanochat", "NanoChatForCausalLM", "RMSNorms without weights, heads that turn backwards", _SIZES,
                    unlike=({"final_logit_softcapping": 5.0},)),
    "apertus": _of("apertus", "ApertusForCausalLM", "an activation that each layer has learnt", _SIZES),
    "youtu": _of("youtu", "YoutuForCausalLM", "latent attention without experts", _without(
        _SIZES, "pad_token_id"  # whose row transformers empties
    ), _LATENT),
    "minicpm3": _of("minicpm3", "MiniCPM3ForCausalLM", "latent attention with factors on depth and width", _SIZES,
                    _LATENT, {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 24},
                    unlike=({"scale_emb": 2}, {"scale_depth": 1.0}, {"dim_model_base": 36})),
    "opt": _of("opt", "OPTForCausalLM", "learned positions from the third row on", _WIDE, {
        "ffn_dim": 88, "word_embed_proj_dim": 48, "max_position_embeddings": 96, "tie_word_embeddings": True,
    }),
    "biogpt": _of("biogpt", "BioGptForCausalLM", "OPT with scaled embeddings", _PLAIN, {
        "max_position_embeddings": 96, "tie_word_embeddings": True,
    }, unlike=({"scale_embedding": False},)),
    "gptj": _of("gptj", "GPTJForCausalLM", "one norm, neighbours rotated, a biased head", _GPT, {"rotary_dim": 8},
                unlike=({"rotary_dim": 4},)),
    "codegen": _of("codegen", "CodeGenForCausalLM", "queries, values and keys in quarters", _GPT, {"rotary_dim": 8}),
    "gpt_neo": _of("gpt_neo", "GPTNeoForCausalLM", "learned positions and windows", _without(
        _PLAIN, "num_hidden_layers", "num_attention_heads"
    ), {
        "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9,
        "max_position_embeddings": 96, "tie_word_embeddings": True,
    }, unlike=({"window_size": 10},)),
    "gpt_bigcode": _of("gpt_bigcode", "GPTBigCodeForCausalLM", "one KV head beside learned positions", _GPT),
    "gpt_bigcode_heads": _of("gpt_bigcode", "GPTBigCodeForCausalLM", "a KV head for each query", _GPT,
                             {"multi_query": False}),
    "falcon": _of("falcon", "FalconForCausalLM", "one KV head after all queries", _WIDE, {
        "num_kv_heads": 4, "tie_word_embeddings": True,
    }),
    "falcon_new": _of("falcon", "FalconForCausalLM", "KV heads between their queries", _WIDE, {
        "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 88, "bias": True,
    }),
    "falcon_in_turn": _of("falcon", "FalconForCausalLM", "a KV head for each query, MLPs after attention", _WIDE, {
        "multi_query": False, "parallel_attn": False, "num_ln_in_parallel_attn": 1,
    }),
    "persimmon": _of("persimmon", "PersimmonForCausalLM", "LayerNorms of heads before a rotation of half", _PLAIN),
    "olmoe": _of("olmoe", "OlmoeForCausalLM", "a norm over all heads, experts after a norm", _without(
        _EXPERTS, "moe_intermediate_size", "num_shared_experts", "head_dim"
    )),
    "flex_olmo": _of("flex_olmo", "FlexOlmoForCausalLM", "experts before a norm", _without(
        _EXPERTS, "moe_intermediate_size", "num_shared_experts", "head_dim"
    ), {"norm_topk_prob": True}),
    "granitemoe": _of("granitemoe", "GraniteMoeForCausalLM", "Granite's factors around experts", _SIZES, _SCALES,
                      {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "granitemoeshared": _of(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", "a shared expert beside Granite's", _SIZES, _SCALES,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 56},
    ),
    "granitemoe_swa": _of(
        "granitemoe_swa", "GraniteMoeSWAForCausalLM", "sinks and windows around Granite's experts", _SIZES, _SCALES,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 56}, _WINDOW,
    ),
    "granite_swa": _of(
        "granite_swa", "GraniteSWAForCausalLM", "a rotary base for each layer", _SIZES, _SCALES, _WINDOW,
        {"layer_rope_theta": [100.0, 0, 10_000.0]}, unlike=({"layer_rope_theta": [1000.0, 10_000.0, 10_000.0]},),
    ),
    "dots1": _of("dots1", "Dots1ForCausalLM", "DeepSeek's experts after Qwen's attention", _ROUTED,
                 {"sliding_window": 9, "max_window_layers": 1},
                 unlike=({"routed_scaling_factor": 1.0}, {"norm_topk_prob": False})),
    "hy_v3": _of("hy_v3", "HYV3ForCausalLM", "a bias that is the MLP's", _EXPERTS,
                 unlike=({"router_scaling_factor": 1.0},)),
    "solar_open": _of("solar_open", "SolarOpenForCausalLM", "GLM's experts in every layer", _without(
        _ROUTED, "intermediate_size", "first_k_dense_replace"
    ), {"head_dim": 16}, seed=1),
    "sarvam_moe": _of("sarvam_moe", "SarvamMoEForCausalLM", "GLM's experts under other names", _ROUTED,
                      {"head_dim": 12}),
    "sarvam_mla": _of("sarvam_mla", "SarvamMLAForCausalLM", "DeepSeek's attention under other names", _ROUTED, _LATENT,
                      {"q_lora_rank": None}, seed=1),
    "exaone_moe": _of("exaone_moe", "ExaoneMoeForCausalLM", "EXAONE's attention after its norms", _EXPERTS, {
        "sliding_window": 9, "sliding_window_pattern": 3,
    }, seed=1),
    "afmoe": _of("afmoe", "AfmoeForCausalLM", "a gate on attention between four norms", _EXPERTS,
                 {"mup_enabled": True, "route_scale": 1.4, "sliding_window": 9, "global_attn_every_n_layers": 2},
                 unlike=({"mup_enabled": False}, {"route_scale": 1.0})),
}  # fmt: skip
