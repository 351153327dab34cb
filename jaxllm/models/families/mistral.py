"""Mistral, Mixtral, Ministral 3 and Mistral 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek
from jaxllm.models.family import Family, hf_expert_names, hf_fields, hf_head_dim, hf_rope, hf_rope_parameters
from jaxllm.models.gguf import GgufFile, Table, only, rope_scaling
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern

# Mistral 7B to Mistral Small 3.2 and Ministral 8B: Llama with an optional sliding window (arXiv:2310.06825)


def mistral_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The window is on every layer, or on those that `layer_types` says."""
    c = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072} | c
    rope, window = hf_rope(c, hf_head_dim(c)), c["sliding_window"]
    kinds = c.get("layer_types") or ["sliding_attention"] * c["num_hidden_layers"]
    layers = tuple(LayerKind(rope, window if kind == "sliding_attention" else None) for kind in kinds)
    return DecoderConfig(**hf_fields(c, layers=layers))


MISTRAL = Family(
    name="Mistral",
    models="Mistral 7B, Nemo, Small 3.x (text), Ministral 8B",
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral", "ministral"),
    wrappers=("mistral3",),
    from_hf=mistral_from_hf,
    gguf_architectures=("llama", "mistral3"),
)


# Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)


def mixtral_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is the experts'; there is no dense MLP."""
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072} | c
    layer = LayerKind(hf_rope(c, hf_head_dim(c), theta=1e6), c.get("sliding_window"), sparse=True)
    moe = MoEConfig(
        num_experts=c.get("num_local_experts", 8),
        top_k=c.get("num_experts_per_tok", 2),
        hidden=c["intermediate_size"],
        scoring="softmax",
        renormalize=True,
    )
    return DecoderConfig(**hf_fields(c, layers=(layer,) * c["num_hidden_layers"], moe=moe))


def mixtral_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """w1 is the gate, w3 the other factor, w2 the way down."""
    return hf_expert_names(config, "model.layers.*.block_sparse_moe", gate="w1", up="w3", down="w2")


MIXTRAL_GGUF: Table = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}


MIXTRAL = Family(
    name="Mixtral",
    models="Mixtral 8x7B, 8x22B",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    from_hf=mixtral_from_hf,
    gguf_architectures=("llama",),
    gguf=MIXTRAL_GGUF,
    gguf_names=permuted_names,
    owns=lambda file: file("expert_count", 0) > 0,
    hf_names=mixtral_hf_names,
)


# Ministral 3: Mistral with YaRN, and queries that grow with the position as in Llama 4

MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""`rope_parameters` of a config that has none."""


def ministral3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The query scaling is part of `rope_parameters`, or of `rope_scaling` in older files."""
    c = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144} | c
    parameters = hf_rope_parameters(c, MINISTRAL3_ROPE)
    rope = hf_rope(c, hf_head_dim(c), parameters=parameters)
    layers = (LayerKind(rope, c.get("sliding_window")),) * c["num_hidden_layers"]
    return DecoderConfig(**hf_fields(c, layers=layers, query_scaling=query_scaling(parameters, rope)))


def query_scaling(parameters: dict[str, Any], rope: RopeConfig) -> QueryScaling | None:
    """The scaling that the rotary `parameters` describe, if they do."""
    beta = parameters.get("llama_4_scaling_beta")
    original = parameters.get("original_max_position_embeddings") or rope.original_length
    if beta and not original:
        raise CheckpointError(
            f"llama_4_scaling_beta is {shown(beta)} without original_max_position_embeddings; accepted are both or none"
        )
    return QueryScaling(beta, original) if beta else None


def _ministral3_gguf_rope(file: GgufFile) -> dict[str, Any]:
    """The architecture is also that of Mistral Small 3, which has none of this."""
    given = rope_scaling(file, lambda multiplier: {"mscale": 1.0, "mscale_all_dim": multiplier})
    return given | {"llama_4_scaling_beta": file("attention.temperature_scale", 0.0)}


MINISTRAL3 = Family(
    name="Ministral 3",
    models="Ministral 3 3B, 8B, 14B (text)",
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("ministral3",),
    from_hf=ministral3_from_hf,
    gguf_architectures=("mistral3",),
    gguf={"rope_scaling": _ministral3_gguf_rope},
    gguf_names=permuted_names,
)


# Mistral 4: DeepSeek's latent attention, Ministral 3's queries that grow with the position, softmax experts

MISTRAL4_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""`rope_parameters` of a config that has none."""
MISTRAL4_DEFAULTS = {
    "n_shared_experts": 1, "n_routed_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 4,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1_048_576,
}  # fmt: skip


def mistral4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The share of a head that is rotated is told by its sizes, whatever `partial_rotary_factor` says."""
    c = MISTRAL4_DEFAULTS | c
    c |= {key: c.get(key) or 1 for key in ("n_group", "topk_group")}
    given = hf_rope_parameters(c, MISTRAL4_ROPE)
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    c |= {"rope_scaling": given, "partial_rotary_factor": None}
    scaling = query_scaling(given, hf_rope(c, c["qk_rope_head_dim"]))
    moe = replace(deepseek.sigmoid_experts(c), scoring="softmax", correction_bias=False)
    return deepseek.latent_config(c, moe, interleaved=bool(c.get("rope_interleave", True)), query_scaling=scaling)


def _mistral4_gguf_rope(file: GgufFile) -> dict[str, Any]:
    """What llama.cpp leaves out of its files is what all published models have."""
    beta, original = MISTRAL4_ROPE["llama_4_scaling_beta"], MISTRAL4_ROPE["original_max_position_embeddings"]
    return deepseek.latent_gguf_rope(file) | {
        "llama_4_scaling_beta": file("attention.temperature_scale", beta),
        "original_max_position_embeddings": file("rope.scaling.original_context_length", original),
    }


MISTRAL4_GGUF: Table = deepseek.LATENT_GGUF | {
    "rope_scaling": _mistral4_gguf_rope,
    "scoring_func": only("expert_gating_func", 1, "softmax"),
}

MISTRAL4 = Family(
    name="Mistral 4",
    models="Mistral Small 4 (text)",
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral4",),
    from_hf=mistral4_from_hf,
    hf_names=deepseek.hf_names,
    gguf_architectures=("mistral4",),
    gguf=MISTRAL4_GGUF,
)
