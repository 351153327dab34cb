"""Llama with experts in place of its MLPs: MiniMax M2, gpt-oss; Hunyuan and ERNIE 4.5, which are dense too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_head_dim, hf_rope, hf_rope_parameters, hf_windows
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, layer_types, nonzero, optional, rope_scaling
from jaxllm.models.hf_fields import COUNT, SIZE
from jaxllm.models.layers.experts import MoEConfig
from jaxllm.models.layers.mlp import ClampedSwiglu
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.models.names import hf_expert_names, in_layers
from jaxllm.weights.fields import NULL, either, many, shown
from jaxllm.weights.names import AnyOf, Pattern, Source, halves_apart, transposed

# MiniMax M2: a norm over all heads of queries and keys, part of each head rotated, experts chosen by sigmoids
MINIMAX_M2_THETA = 5_000_000.0


def minimax_m2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rotary_dim` is what is rotated of a head. `intermediate_size` is the experts'; there is no dense MLP."""
    c = {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608, "num_experts_per_tok": 8,
        "num_local_experts": c.get("num_experts", 256),
    } | c  # fmt: skip
    head_dim = hf_head_dim(c)
    rope = hf_rope(c, theta=MINIMAX_M2_THETA, partial=(c.get("rotary_dim") or head_dim) / head_dim)
    moe = hf_experts(
        c, "num_local_experts", "intermediate_size", scoring="sigmoid", correction_bias=True, renormalize=True
    )
    return hf_decoder(c, layers=LayerKind(rope, sparse=True), qk_norm="rms_whole", moe=moe)


def minimax_m2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    block = "model.layers.*.block_sparse_moe"
    bias: dict[str, Pattern] = {"layers.*.mlp.router.correction_bias": f"{block}.e_score_correction_bias"}
    return hf_expert_names(config, block, gate="w1", up="w3", down="w2") | bias


MINIMAX_M2 = Family(
    name="MiniMax M2", models="MiniMax-M2, M2.1, M2.5, M2.7",
    architectures=("MiniMaxM2ForCausalLM",), model_types=("minimax_m2",), gguf_architectures=("minimax-m2",),
    from_hf=minimax_m2_from_hf, hf_names=minimax_m2_hf_names,
    gguf=GGUF_EXPERTS | {
        "intermediate_size": "expert_feed_forward_length", "rope_theta": optional("rope.freq_base", MINIMAX_M2_THETA),
    },
)  # fmt: skip


# gpt-oss: attention sinks, every other layer with a window, biased experts with a clamped gate (arXiv:2508.10925)
GPT_OSS_THETA = 150_000.0
GPT_OSS_ROPE: dict[str, Any] = {  # `rope_parameters` of a config that has none
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
SWIGLU = ClampedSwiglu(1.702, 7.0)


def gpt_oss_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {
        "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 128, "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072, "num_local_experts": c.get("num_experts", 128),
    } | c  # fmt: skip
    rope = hf_rope(c, theta=GPT_OSS_THETA, parameters=hf_rope_parameters(c, GPT_OSS_ROPE))
    swiglu = ClampedSwiglu(float(c.get("swiglu_alpha", SWIGLU.alpha)), float(c.get("swiglu_limit", SWIGLU.limit)))
    moe = hf_experts(
        c, "num_local_experts", "intermediate_size", renormalize=True, router_bias=True, expert_bias=True, swiglu=swiglu
    )
    layers = [
        LayerKind(rope, window, sparse=True) for window in hf_windows(c | {"sliding_window_pattern": None}, period=2)
    ]
    return hf_decoder(c, layers=layers, moe=moe, attention_bias=c.get("attention_bias", True), attention_sinks=True)


_BLOCK, _EXPERTS = "model.layers.*.mlp", "model.layers.*.mlp.experts"
GPT_OSS_NAMES: dict[str, Pattern] = {
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.mlp.router.weight": f"{_BLOCK}.router.weight",
    "layers.*.mlp.router.bias": f"{_BLOCK}.router.bias",
    "layers.*.mlp.experts.gate_up.weight": AnyOf(
        Source(f"{_EXPERTS}.gate_up_proj_blocks", halves_apart, by_rows=True),
        Source(f"{_EXPERTS}.gate_up_proj", lambda weight: halves_apart(transposed(weight))),
    ),
    "layers.*.mlp.experts.gate_up.bias": Source(f"{_EXPERTS}.gate_up_proj_bias", halves_apart),
    "layers.*.mlp.experts.down.weight": AnyOf(
        f"{_EXPERTS}.down_proj_blocks", Source(f"{_EXPERTS}.down_proj", transposed)
    ),
    "layers.*.mlp.experts.down.bias": f"{_EXPERTS}.down_proj_bias",
}
"""Rows of gate and up by turns. What is published as MXFP4 lies `[out, in]`, and what is not `[in, out]`."""

GPT_OSS = Family(
    name="gpt-oss", models="gpt-oss 20B, 120B",
    architectures=("GptOssForCausalLM",), model_types=("gpt_oss",), gguf_architectures=("gpt-oss",),
    from_hf=gpt_oss_from_hf, hf_names=GPT_OSS_NAMES,
    # A file does not say that the bounds of YaRN's ramp are not rounded, nor what the gate is.
    gguf=GGUF_EXPERTS | {
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": nonzero("attention.sliding_window"), "layer_types": layer_types(2),
        "rope_theta": optional("rope.freq_base", GPT_OSS_THETA),
        "rope_scaling": lambda file: rope_scaling(file) | {"truncate": False},
    },
    gguf_names={
        "layers.*.attention.sinks": "blk.*.attn_sinks.weight", "layers.*.mlp.router.bias": "blk.*.ffn_gate_inp.bias",
    },
)  # fmt: skip


# Hunyuan, dense and with experts: Llama with norms on queries and keys after their rotation
def hunyuan_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Experts beside a shared one of the same size in every layer; numbers may be lists with one for each."""
    c = {"num_experts": 1, "moe_topk": 1} | c
    size = c["intermediate_size"]
    for key, accepted in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if c.get(key) is not None and _of_all(c, key) != accepted:
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {accepted}")
    count, top_k = _of_all(c, "num_experts"), _of_all(c, "moe_topk")
    moe = MoEConfig(num_experts=count, top_k=top_k, hidden=size, renormalize=True, shared_hidden=size)
    return hunyuan_from_hf(c, moe)


def _of_all(c: dict[str, Any], key: str) -> int:
    given = c[key]
    values = given if isinstance(given, list) else [given]
    if len(set(values)) != 1:
        raise CheckpointError(f"{key} is {shown(given)}; accepted is one number for all layers")
    return values[0]


def hunyuan_from_hf(c: dict[str, Any], moe: MoEConfig | None = None) -> DecoderConfig:
    c = {"rms_norm_eps": 1e-5} | c
    layer = LayerKind(_hunyuan_rope(c), sparse=moe is not None)
    bias = c.get("attention_bias", False)
    return hf_decoder(c, layers=layer, attention_bias=bias, qk_norm="rms", qk_norm_rotated=True, moe=moe)


def _hunyuan_rope(c: dict[str, Any]) -> RopeConfig:
    """Dynamic scaling with an `alpha` has the base of a sequence of some length, whatever its length is."""
    given, dim = hf_rope_parameters(c), hf_head_dim(c)
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return hf_rope(c)
    rope = hf_rope(c, parameters=given | {"rope_type": "default"})
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)))


def hunyuan_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        **in_layers(
            "model.layers.*.self_attn", {"attention.q_norm": "query_layernorm", "attention.k_norm": "key_layernorm"}
        ),
        **hf_expert_names(config, shared="shared_mlp"),
        "layers.*.mlp.router.weight": "model.layers.*.mlp.gate.wg.weight",
    }


def _one_gguf_shared_expert(file: GgufFile) -> int:
    size, key = file("feed_forward_length"), "expert_shared_feed_forward_length"
    if file(key, 0) not in (0, size):
        raise CheckpointError(f"{key} is {file(key)}; accepted is that of a routed expert, {size}")
    return 1


HUNYUAN = Family(
    name="Hunyuan", models="Hunyuan 0.5B, 1.8B, 4B, 7B",
    architectures=("HunYuanDenseV1ForCausalLM",), model_types=("hunyuan_v1_dense",),
    gguf_architectures=("hunyuan-dense",),
    from_hf=hunyuan_from_hf, hf_names=hunyuan_hf_names,
)  # fmt: skip

HUNYUAN_MOE = Family(
    name="Hunyuan MoE", models="Hunyuan-A13B",
    architectures=("HunYuanMoEV1ForCausalLM",), model_types=("hunyuan_v1_moe",), gguf_architectures=("hunyuan-moe",),
    fields={
        "num_experts": either(COUNT, many(COUNT, 2**10)),
        "moe_topk": either(COUNT, many(COUNT, 2**10)),
        "moe_intermediate_size": either(SIZE, many(SIZE, 2**10), NULL),
        "num_shared_expert": either(COUNT, many(COUNT, 2**10), NULL),
    },
    from_hf=hunyuan_moe_from_hf, hf_names=hunyuan_hf_names,
    gguf=GGUF_EXPERTS | {"moe_topk": "expert_used_count", "num_shared_expert": _one_gguf_shared_expert},
)  # fmt: skip


# ERNIE 4.5, dense and with experts: Llama whose heads are rotated in neighbouring pairs
ERNIE_THETA = 500_000.0
ERNIE_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131_072}
ERNIE_MOE_DEFAULTS = ERNIE_DEFAULTS | {
    "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip


def ernie_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`use_bias` is on every product but the head."""
    c, bias = ERNIE_DEFAULTS | {"head_dim": 128, "num_key_value_heads": 2} | c, c.get("use_bias", False)
    rope = hf_rope(c, theta=ERNIE_THETA, interleaved=c.get("model_type") != "paddleocr_vl_text")
    return hf_decoder(c, layers=LayerKind(rope), attention_bias=bias, mlp_bias=bias)


def ernie_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A bias has a say in who is chosen, and none in the weights.

    `moe_norm_min`, the least that these are divided by, is below any sum of theirs: the chosen are a large part of all.
    """
    c = ERNIE_MOE_DEFAULTS | c
    if c.get("use_bias"):
        raise CheckpointError(f"use_bias is {shown(c['use_bias'])}; accepted is false in a model with experts")
    moe = MoEConfig(
        num_experts=c["moe_num_experts"], top_k=c["moe_k"], hidden=c["moe_intermediate_size"], correction_bias=True,
        renormalize=True, shared_hidden=c["moe_num_shared_experts"] * c["moe_intermediate_size"],
    )  # fmt: skip
    number, step = c["num_hidden_layers"], c["moe_layer_interval"]
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    last = number - 1 if last == -1 else last
    rope = hf_rope(c, theta=ERNIE_THETA, interleaved=True)
    layers = [LayerKind(rope, sparse=(i + 1) % step == 0 and first <= i <= last) for i in range(number)]
    return hf_decoder(c, layers=layers, moe=moe)


def _bias_row(name: str) -> dict[str, Pattern]:
    """The bias on the choice is a row of a matrix, since one model has text's and images' experts in one tensor."""
    return {"layers.*.mlp.router.correction_bias": Source(name, lambda bias: bias.reshape(-1))}


ERNIE = Family(
    name="ERNIE 4.5", models="ERNIE-4.5-0.3B, PaddleOCR-VL (text)",
    architectures=("Ernie4_5ForCausalLM", "PaddleOCRVLForConditionalGeneration"),
    model_types=("ernie4_5", "paddleocr_vl_text"), wrappers=("paddleocr_vl",), gguf_architectures=("ernie4_5",),
    from_hf=ernie_from_hf, gguf={"rope_theta": optional("rope.freq_base", ERNIE_THETA)},
)  # fmt: skip

ERNIE_MOE = Family(
    name="ERNIE 4.5 MoE", models="ERNIE-4.5-21B-A3B, 300B-A47B",
    architectures=("Ernie4_5_MoeForCausalLM",), model_types=("ernie4_5_moe",), gguf_architectures=("ernie4_5-moe",),
    from_hf=ernie_moe_from_hf, hf_names=_bias_row("model.layers.*.mlp.moe_statics.e_score_correction_bias"),
    gguf={
        "rope_theta": optional("rope.freq_base", ERNIE_THETA),
        "moe_num_experts": "expert_count", "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": lambda file: (
            file("expert_shared_feed_forward_length", 0) // file("expert_feed_forward_length")
        ),
        "moe_layer_start_index": optional("leading_dense_block_count", 0),
        "moe_layer_interval": optional("interleave_moe_layer_step", 1),
    },
    gguf_names=_bias_row("blk.*.exp_probs_b.bias"),
)  # fmt: skip
