"""Other families with a known router: OLMo, Granite, EXAONE, Qwen and GLM with experts, Trinity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek, llama, mamba, norms
from jaxllm.models.families.dense import full_first
from jaxllm.models.families.gpt import usual
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_head_dim, hf_rope, hf_windows
from jaxllm.models.hf_fields import FACTOR, MAYBE_FLAG, OFF, THETA, maybe
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.names import hf_expert_names, in_layers
from jaxllm.weights.fields import either, many, whole
from jaxllm.weights.names import Pattern, Source


def with_experts(config: DecoderConfig, moe: MoEConfig, sparse: Iterable[bool], **changes: Any) -> DecoderConfig:
    """The same model with experts in these layers."""
    layers = tuple(replace(layer, sparse=has) for layer, has in zip(config.layers, sparse, strict=True))
    return replace(config, layers=layers, moe=moe, **changes)


def sparse_layers(c: dict[str, Any], dense: int = 1) -> list[bool]:
    """Layers with experts: as `mlp_layer_types` says, or all after the first few."""
    kinds = c.get("mlp_layer_types")
    return [kind == "sparse" for kind in kinds] if kinds else [i >= dense for i in range(c["num_hidden_layers"])]


_MLP = "model.layers.*.mlp"
ONE_GROUP: dict[str, Any] = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
EXPERTS = ONE_GROUP | {"num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1}


def _routed(c: dict[str, Any], scale: str) -> MoEConfig:
    """DeepSeek's experts under Qwen's names."""
    names = {"n_routed_experts": c["num_experts"], "n_shared_experts": c["num_shared_experts"]}
    return deepseek.sigmoid_experts(c | names | {"routed_scaling_factor": c[scale]})


# OLMoE and FlexOlmo: OLMo 2's norms, in OLMoE before attention and MLP (arXiv:2409.02060, arXiv:2507.07024)
def olmoe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    flex = c.get("model_type") == "flex_olmo"
    c = {"num_experts": 64, "num_experts_per_tok": 5 if flex else 8, "rms_norm_eps": 1e-6 if flex else 1e-5} | c
    moe = hf_experts(c, "num_experts", "intermediate_size", renormalize=bool(c.get("norm_topk_prob")))
    layer = LayerKind(hf_rope(c, theta=500_000.0 if flex else 10_000.0), sparse=True)
    own = norms.WHAT_OLMO_IS if flex else {"qk_norm": "rms_whole"}
    return hf_decoder(c, layers=layer, moe=moe, attention_bias=c.get("attention_bias"), **own)


OLMOE = Family(
    name="OLMoE", models="OLMoE-1B-7B, FlexOlmo",
    architectures=("OlmoeForCausalLM", "FlexOlmoForCausalLM"), model_types=("olmoe", "flex_olmo"),
    fields={"clip_qkv": OFF}, from_hf=olmoe_from_hf,
    hf_names=lambda config: in_layers("model.layers.*", norms.POST_NORMS if config.post_norms else {}),
)  # fmt: skip


# Granite 3 with experts, and Granites with sinks, and a window on three layers of four
def granite_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    if c["model_type"] == "granite_swa":
        return _with_sinks(c, mamba.granite_from_hf({"tie_word_embeddings": True, "rms_norm_eps": 1e-5} | c))
    attending = {"layer_types": ["attention"] * c["num_hidden_layers"], "position_embedding_type": "rope"}
    shared = 0 if c["model_type"] == "granitemoe" else c.get("shared_intermediate_size", 0)
    config = mamba.granite4_from_hf(c | attending | {"shared_intermediate_size": shared})
    return _with_sinks(c, config) if c["model_type"] == "granitemoe_swa" else config


def _with_sinks(c: dict[str, Any], config: DecoderConfig) -> DecoderConfig:
    """Layers may have rotary bases of their own; one of 0 is no positions."""
    thetas = c.get("layer_rope_theta") or [rope.theta for rope in config.ropes] * config.num_layers
    if len(thetas) != config.num_layers:
        raise CheckpointError(f"layer_rope_theta has {len(thetas)} entries; accepted are {config.num_layers}")
    layers = tuple(
        replace(
            layer, window=c.get("sliding_window", 128) if kind == "sliding_attention" else None,
            rope=replace(layer.rope, theta=float(theta)) if theta and layer.rope else None,
        )
        for layer, kind, theta in zip(config.layers, full_first(c), thetas, strict=True)
    )  # fmt: skip
    return replace(config, layers=layers, attention_sinks=True)


def granite_moe_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    own = mamba.granite4_hf_names(config) if config.moe else {}
    return own | {"layers.*.attention.sinks": "model.layers.*.self_attn.sinks"}


GRANITE_MOE = Family(
    name="Granite 3 MoE", models="Granite 3.0, 3.1 1B-A400M, 3B-A800M; Granite with windows",
    architectures=(
        "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM"
    ),
    model_types=("granitemoe", "granitemoeshared", "granitemoe_swa", "granite_swa"),
    fields={
        "shared_intermediate_size": whole(0, 2**24), "layer_rope_theta": maybe(many(either(THETA, whole(0, 0)), 2**10)),
    },
    from_hf=granite_moe_from_hf, hf_names=granite_moe_hf_names,
)  # fmt: skip


# dots.llm1, Hunyuan 3, Solar Open, Sarvam: attention of Qwen 3, GLM-4.5 or DeepSeek, and DeepSeek V3's experts
def dots1_from_hf(c: dict[str, Any]) -> DecoderConfig:
    defaults = ONE_GROUP | {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "max_window_layers": 62}
    c = defaults | c | {"use_sliding_window": True, "head_dim": hf_head_dim(c)}
    sparse = sparse_layers(c, c.get("first_k_dense_replace", 0))
    return with_experts(llama.qwen3_from_hf(c), deepseek.sigmoid_experts(c), sparse)


def hunyuan3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    sizes = {"num_experts": 192, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "rms_norm_eps": 1e-5}
    c = EXPERTS | sizes | {"rope_theta": 11_158_840.0} | c | {"use_sliding_window": False} | ONE_GROUP
    return with_experts(llama.qwen3_from_hf(c), _routed(c, "router_scaling_factor"), sparse_layers(c))


def solar_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"head_dim": 128, "moe_intermediate_size": 1280, "rope_theta": 1e6, "partial_rotary_factor": 1.0} | c
    own = {"use_qk_norm": False, "first_k_dense_replace": 0, "intermediate_size": c["moe_intermediate_size"]}
    return deepseek.glm4_moe_from_hf(c | own)


def sarvam_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Older files have other names for three keys."""
    c = usual(
        c, {"tie_word_embeddings": False}, n_routed_experts="num_experts", n_shared_experts="num_shared_experts",
        attention_bias="use_qkv_bias",
    )  # fmt: skip
    if c["model_type"] == "sarvam_mla":
        return deepseek.v3_from_hf({"n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 1} | c)
    more = {"head_dim": 64, "num_key_value_heads": 4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 6}
    defaults = more | {"rope_theta": 8e6, "partial_rotary_factor": 1.0, "use_qk_norm": True, "rms_norm_eps": 1e-6}
    return deepseek.glm4_moe_from_hf(defaults | c)


SARVAM_NAMES: dict[str, Pattern] = {
    "embed.weight": "model.word_embeddings.weight",
    "layers.*.mlp.router.correction_bias": "model.layers.*.mlp.gate.expert_bias",
    **in_layers("model.layers.*.attention", {
        "attention.qkv": "query_key_value", "attention.output": "dense", "attention.q_norm": "query_layernorm",
        "attention.k_norm": "key_layernorm",
    }),
}  # fmt: skip

DOTS1 = Family(
    name="dots.llm1", models="dots.llm1",
    architectures=("Dots1ForCausalLM",), model_types=("dots1",), from_hf=dots1_from_hf,
)  # fmt: skip

HUNYUAN3 = Family(
    name="Hunyuan 3", models="Hy3-preview (295B-A21B)",
    architectures=("HYV3ForCausalLM",), model_types=("hy_v3",),
    fields={"router_scaling_factor": FACTOR, "mlp_bias": OFF}, from_hf=hunyuan3_from_hf,
    hf_names=lambda config: hf_expert_names(config, shared="shared_mlp") | {
        "layers.*.mlp.router.weight": f"{_MLP}.router.gate.weight",
        "layers.*.mlp.router.correction_bias": f"{_MLP}.expert_bias",
    },
)  # fmt: skip

SOLAR = Family(
    name="Solar Open", models="Solar-Open-100B",
    architectures=("SolarOpenForCausalLM",), model_types=("solar_open",), from_hf=solar_from_hf,
)  # fmt: skip

SARVAM = Family(
    name="Sarvam", models="Sarvam-30B, 105B",
    architectures=("SarvamMoEForCausalLM", "SarvamMLAForCausalLM"), model_types=("sarvam_moe", "sarvam_mla"),
    fields={"use_qkv_bias": MAYBE_FLAG},
    from_hf=sarvam_from_hf, hf_names=lambda config: deepseek.LATENT_NAMES if config.mla else SARVAM_NAMES,
)  # fmt: skip


# K-EXAONE: EXAONE 4's attention behind norms in front of it, and DeepSeek V3's experts
def exaone_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = EXPERTS | {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.5} | c
    moe, sparse = _routed(c, "routed_scaling_factor"), sparse_layers(c, c.get("first_k_dense_replace", 1))
    return with_experts(norms.exaone4_from_hf(c), moe, sparse, pre_norms=True, post_norms=False)


EXAONE_MOE = Family(
    name="K-EXAONE", models="K-EXAONE-236B-A23B",
    architectures=("ExaoneMoeForCausalLM",), model_types=("exaone_moe",), from_hf=exaone_moe_from_hf,
    hf_names={"layers.*.mlp.router.correction_bias": f"{_MLP}.e_score_correction_bias"},
)  # fmt: skip


# Trinity (AFMoE): windows, no positions where there is none, a gate on attention, four norms, sigmoid scores
def afmoe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {
        "head_dim": 128, "sliding_window": 1024, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6,
        "num_shared_experts": 2, "moe_intermediate_size": 1408, "route_scale": 1.0, "rms_norm_eps": 1e-5,
    } | c  # fmt: skip
    rope, period = hf_rope(c), c.get("global_attn_every_n_layers") or 4
    windows = hf_windows(c | {"sliding_window_pattern": None}, period=period)
    sparse = sparse_layers(c, c["num_dense_layers"])
    return hf_decoder(
        c, layers=[LayerKind(rope if w else None, w, sparse=s) for w, s in zip(windows, sparse, strict=True)],
        moe=_routed(c | ONE_GROUP, "route_scale"), qk_norm="rms", attention_gate=True, post_norms=True,
        attention_bias=c.get("attention_bias"),
        embedding_scale=c["hidden_size"] ** 0.5 if c.get("mup_enabled") else 1.0,
    )  # fmt: skip


def afmoe_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """A head's gate follows its query."""

    def by_head(queries: np.ndarray, gates: np.ndarray) -> np.ndarray:
        heads = (rows.reshape(-1, config.head_dim, rows.shape[-1]) for rows in (queries, gates))
        return np.stack([*heads], axis=1).reshape(-1, queries.shape[-1])

    attention = "model.layers.*.self_attn"
    queries = Source(f"{attention}.q_proj.weight", by_head, also=(f"{attention}.gate_proj.weight",))
    return {
        **in_layers("model.layers.*", {
            "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_mlp_layernorm",
            "mlp_post_norm": "post_mlp_layernorm", "mlp.router": "mlp.router.gate",
        }),
        "layers.*.mlp.router.correction_bias": f"{_MLP}.expert_bias",
        "layers.*.attention.qkv.weight": (queries, f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"),
    }  # fmt: skip


AFMOE = Family(
    name="Trinity", models="Trinity Nano, Mini, Large (AFMoE)",
    architectures=("AfmoeForCausalLM",), model_types=("afmoe",),
    fields={"route_scale": FACTOR, "mup_enabled": MAYBE_FLAG},
    from_hf=afmoe_from_hf, hf_names=afmoe_hf_names,
)  # fmt: skip
