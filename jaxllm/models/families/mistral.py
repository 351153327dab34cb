"""Mistral, Mixtral, Ministral 3 and Mistral 4, and Llama 4, whose queries grow with the position as theirs do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek
from jaxllm.models.families.llama import rotating_layers
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_rope, hf_rope_parameters, sliding_layers
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, only, optional, rope_scaling
from jaxllm.models.layers.attention import QueryScaling
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import hf_expert_names, in_layers, permuted_names
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern, Source, transposed


# Mistral 7B to Mistral Small 3.2 and Ministral 8B: Llama with an optional sliding window (arXiv:2310.06825)
def mistral_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The window is on every layer, or on those that `layer_types` says."""
    c = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072} | c
    kinds = c.get("layer_types") or ["sliding_attention"] * c["num_hidden_layers"]
    return hf_decoder(c, layers=sliding_layers(hf_rope(c), c["sliding_window"], kinds))


MISTRAL = Family(
    name="Mistral", models="Mistral 7B, Nemo, Small 3.x (text), Ministral 8B",
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral", "ministral"), wrappers=("mistral3",),
    from_hf=mistral_from_hf, gguf_architectures=("llama", "mistral3"), gguf=None,
)  # fmt: skip


# Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)
def mixtral_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    } | c  # fmt: skip
    layer = LayerKind(hf_rope(c, theta=1e6), c.get("sliding_window"), sparse=True)
    return hf_decoder(c, layers=layer, moe=hf_experts(c, "num_local_experts", "intermediate_size", renormalize=True))


MIXTRAL = Family(
    name="Mixtral", models="Mixtral 8x7B, 8x22B",
    architectures=("MixtralForCausalLM",), model_types=("mixtral",),
    from_hf=mixtral_from_hf,
    hf_names=partial(hf_expert_names, block="model.layers.*.block_sparse_moe", gate="w1", up="w3", down="w2"),
    gguf_architectures=("llama",), owns=lambda file: file("expert_count", 0) > 0,
    gguf={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    gguf_names=permuted_names,
)  # fmt: skip


# Ministral 3: Mistral with YaRN, and queries that grow with the position as in Llama 4
MINISTRAL3_ROPE: dict[str, Any] = {  # `rope_parameters` of a config that has none
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def ministral3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The query scaling is part of `rope_parameters`, or of `rope_scaling` in older files."""
    c = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144} | c
    parameters = hf_rope_parameters(c, MINISTRAL3_ROPE)
    rope = hf_rope(c, parameters=parameters)
    layer = LayerKind(rope, c.get("sliding_window"))
    return hf_decoder(c, layers=layer, query_scaling=query_scaling(parameters, rope))


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
    name="Ministral 3", models="Ministral 3 3B, 8B, 14B (text)",
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), model_types=("ministral3",),
    from_hf=ministral3_from_hf,
    gguf_architectures=("mistral3",), gguf={"rope_scaling": _ministral3_gguf_rope}, gguf_names=permuted_names,
)  # fmt: skip


# Mistral 4: DeepSeek's latent attention, Ministral 3's queries that grow with the position, softmax experts
MISTRAL4_ROPE = MINISTRAL3_ROPE | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
"""`rope_parameters` of a config that has none."""


def mistral4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The share of a head that is rotated is told by its sizes, whatever `partial_rotary_factor` says."""
    c = {
        "n_shared_experts": 1, "n_routed_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 4,
        "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576,
    } | c  # fmt: skip
    c |= {key: c.get(key) or 1 for key in ("n_group", "topk_group")}
    given = hf_rope_parameters(c, MISTRAL4_ROPE)
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    c |= {"rope_scaling": given, "partial_rotary_factor": None}
    scaling = query_scaling(given, hf_rope(c, c["qk_rope_head_dim"]))
    moe = replace(deepseek.sigmoid_experts(c), scoring="softmax", correction_bias=False)
    return deepseek.latent_config(c, moe, interleaved=bool(c.get("rope_interleave", True)), query_scaling=scaling)


def _mistral4_gguf_rope(file: GgufFile) -> dict[str, Any]:
    """Keys that llama.cpp leaves out of its files have the values of all published models."""
    beta, original = MISTRAL4_ROPE["llama_4_scaling_beta"], MISTRAL4_ROPE["original_max_position_embeddings"]
    return deepseek.latent_gguf_rope(file) | {
        "llama_4_scaling_beta": file("attention.temperature_scale", beta),
        "original_max_position_embeddings": file("rope.scaling.original_context_length", original),
    }


MISTRAL4 = Family(
    name="Mistral 4", models="Mistral Small 4 (text)",
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"), model_types=("mistral4",),
    from_hf=mistral4_from_hf, hf_names=deepseek.LATENT_NAMES, gguf_architectures=("mistral4",),
    gguf=deepseek.LATENT_GGUF | {
        "rope_scaling": _mistral4_gguf_rope, "scoring_func": only("expert_gating_func", 1, "softmax"),
    },
)  # fmt: skip


# Llama 4, text: attention in chunks on three of four layers, no positions on the fourth, experts and a shared one
LLAMA4_THETA = 500_000.0
CHUNK = 8192
WITHOUT_NORM = 128
"""A GGUF file does not say whether queries and keys have a norm: they do not in the model of so many experts."""


def llama4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is that of the experts; `no_rope_layers` has a 1 for each layer that does rotate."""
    c = {
        "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "intermediate_size_mlp": 16_384, "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True,
        "attention_chunk_size": CHUNK, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
    } | c  # fmt: skip
    number, step = c["num_hidden_layers"], c.get("interleave_moe_layer_step", 1)
    rotating, chunk = rotating_layers(c), c["attention_chunk_size"]
    sparse = c["moe_layers"] if c.get("moe_layers") is not None else range(step - 1, number, step)
    kinds = c.get("layer_types") or [
        "chunked_attention" if rotates and chunk is not None else "full_attention" for rotates in rotating
    ]
    chunked = [kind == "chunked_attention" for kind in kinds]
    rope = hf_rope(c, theta=LLAMA4_THETA, interleaved=True)
    layers = [
        LayerKind(rope if rotates else None, chunk if chunks else None, sparse=index in sparse, chunked=chunks)
        for index, (rotates, chunks) in enumerate(zip(rotating, chunked, strict=True))
    ]
    scaling = QueryScaling(c["attn_scale"], c["floor_scale"], first=1, unrotated_only=True)
    moe = hf_experts(
        c, "num_local_experts", "intermediate_size", scoring="sigmoid", scale_inputs=True,
        shared_hidden=c["intermediate_size"],
    )  # fmt: skip
    return hf_decoder(
        c | {"intermediate_size": c["intermediate_size_mlp"]}, layers=layers, moe=moe,
        max_position_embeddings=c["max_position_embeddings"], attention_bias=c.get("attention_bias", False),
        qk_norm="unit" if c["use_qk_norm"] else None,
        query_scaling=scaling if c["attn_temperature_tuning"] else None,
    )  # fmt: skip


def llama4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The experts' matrices lie `[in, out]`."""
    block = "model.layers.*.feed_forward"
    return {
        **hf_expert_names(config, block, shared="shared_expert"),
        **in_layers(block, {"mlp.gate_up": ("gate_proj", "up_proj"), "mlp.down": "down_proj"}),
        "layers.*.mlp.router.weight": f"{block}.router.weight",
        "layers.*.mlp.experts.gate_up.weight": Source(f"{block}.experts.gate_up_proj", transposed),
        "layers.*.mlp.experts.down.weight": Source(f"{block}.experts.down_proj", transposed),
    }


def _gguf_chunked(file: GgufFile) -> bool:
    """A window of 0 says that all layers rotate and see everything."""
    return file("attention.sliding_window", CHUNK) != 0


LLAMA4 = Family(
    name="Llama 4", models="Llama 4 Scout, Maverick (text)",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text",), wrappers=("llama4",), layer_types=("full_attention", "chunked_attention"),
    from_hf=llama4_from_hf, hf_names=llama4_hf_names, gguf_architectures=("llama4",),
    # A file does not say how large chunks are, how queries grow, nor which layers have no positions.
    gguf=GGUF_EXPERTS | {
        "intermediate_size_mlp": "feed_forward_length",
        "intermediate_size": "expert_feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
        "rope_theta": optional("rope.freq_base", LLAMA4_THETA),
        "no_rope_layers": lambda file: None if _gguf_chunked(file) else [1] * file.num_layers,
        "attention_chunk_size": lambda file: CHUNK if _gguf_chunked(file) else None,
        "attn_temperature_tuning": _gguf_chunked,
        "use_qk_norm": lambda file: file("expert_count") != WITHOUT_NORM,
    },
)  # fmt: skip
