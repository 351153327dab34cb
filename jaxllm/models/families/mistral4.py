"""Mistral 4: DeepSeek's latent attention, Ministral 3's queries that grow with the position, softmax experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.families import deepseek
from jaxllm.models.families.ministral3 import query_scaling
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile, only
from jaxllm.models.hf import hf_rope, hf_rope_parameters

ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""`rope_parameters` of a config that has none."""
DEFAULTS = {
    "n_shared_experts": 1, "n_routed_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 4,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1_048_576,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The share of a head that is rotated is told by its sizes, whatever `partial_rotary_factor` says."""
    c = DEFAULTS | c
    c |= {key: c.get(key) or 1 for key in ("n_group", "topk_group")}
    given = hf_rope_parameters(c, ROPE)
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    c |= {"rope_scaling": given, "partial_rotary_factor": None}
    scaling = query_scaling(given, hf_rope(c, c["qk_rope_head_dim"]))
    moe = replace(deepseek.sigmoid_experts(c), scoring="softmax", correction_bias=False)
    return deepseek.latent_config(c, moe, interleaved=bool(c.get("rope_interleave", True)), query_scaling=scaling)


def _gguf_rope(file: GgufFile) -> dict[str, Any]:
    """What llama.cpp leaves out of its files is what all published models have."""
    beta, original = ROPE["llama_4_scaling_beta"], ROPE["original_max_position_embeddings"]
    return deepseek.latent_gguf_rope(file) | {
        "llama_4_scaling_beta": file("attention.temperature_scale", beta),
        "original_max_position_embeddings": file("rope.scaling.original_context_length", original),
    }


FAMILY = Family(
    name="Mistral 4",
    models="Mistral Small 4 (text)",
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral4",),
    from_hf=from_hf,
    hf_names=deepseek.hf_names,
    gguf_architectures=("mistral4",),
    gguf=deepseek.LATENT_GGUF | {"rope_scaling": _gguf_rope, "scoring_func": only("expert_gating_func", 1, "softmax")},
)
