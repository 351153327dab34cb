"""LFM2 of Liquid AI: short convolutions, and attention in every few layers; dense, or with experts (8B-A1B)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table, attending_kv_heads, only, optional
from jaxllm.models.gguf_names import gguf_linear
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.layers.conv import ConvConfig
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import AnyOf, Pattern, Source, without_middle_axis

LAYER_TYPES = ("full_attention", "conv")
THETA = 1_000_000.0
SIGMOID = 2
"""`expert_gating_func` of GGUF files."""
ROUTER_EPS = 1e-6
"""Added to the sum that the chosen experts' scores are divided by."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Which layers attend is said by `layer_types` or, in older files, by `full_attn_idxs`."""
    every = list(range(c["num_hidden_layers"]))
    attending = every if c.get("full_attn_idxs") is None else c["full_attn_idxs"]
    kinds = c.get("layer_types") or ["full_attention" if i in attending else "conv" for i in every]
    return DecoderConfig(**_fields(c | {"intermediate_size": _mlp_size(c)}, _layers(c, kinds)))


def moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The first `num_dense_layers` have no experts. A bias has a say in who is chosen, and none in the weights."""
    c = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2} | c
    moe = MoEConfig(
        num_experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        hidden=c["moe_intermediate_size"],
        scoring="sigmoid",
        correction_bias=c.get("use_expert_bias", True),
        renormalize=bool(c.get("norm_topk_prob", True)),
        renormalize_eps=ROUTER_EPS,
        scale=c.get("routed_scaling_factor", 1.0),
    )
    layers = _layers(c, c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"], c["num_dense_layers"])
    return DecoderConfig(**_fields(c, layers, moe=moe))


def _fields(c: dict[str, Any], layers: tuple[LayerKind, ...], **differences: Any) -> dict[str, Any]:
    return hf_fields(
        {"max_position_embeddings": 128_000, "num_key_value_heads": 8} | c,
        layers=layers,
        norm_eps=c.get("norm_eps", 1e-5),
        hidden_act="silu",
        tie_word_embeddings=c.get("tie_embedding", c.get("tie_word_embeddings", True)),
        qk_norm="rms",
        conv=ConvConfig(c.get("conv_L_cache", 3), bias=bool(c.get("conv_bias", False))),
        **differences,
    )


def _layers(c: dict[str, Any], kinds: list[str], num_dense: int | None = None) -> tuple[LayerKind, ...]:
    rope = hf_rope(c, hf_head_dim(c), theta=THETA)
    sparse = [num_dense is not None and i >= num_dense for i in range(len(kinds))]
    return tuple(
        LayerKind(None, sparse=is_sparse, mixer="conv") if kind == "conv" else LayerKind(rope, sparse=is_sparse)
        for kind, is_sparse in zip(kinds, sparse, strict=True)
    )


def _mlp_size(c: dict[str, Any]) -> int:
    """`block_auto_adjust_ff_dim` says that two thirds of the stated size are meant, rounded up to whole multiples."""
    size = c.get("block_ff_dim", c.get("intermediate_size", 12_288))
    if not c.get("block_auto_adjust_ff_dim", True):
        return size
    size, unit = int(2 * size / 3), c.get("block_multiple_of", 256)
    factor = c.get("block_ffn_dim_multiplier", 1.0)
    return size if factor is None else -(-int(factor * size) // unit) * unit


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Everything within a layer has names of its own."""
    layer, attention, mlp = "model.layers.*", "model.layers.*.self_attn", "model.layers.*.feed_forward"
    names: dict[str, Pattern] = {
        "norm.weight": "model.embedding_norm.weight",
        "layers.*.attention_norm.weight": f"{layer}.operator_norm.weight",
        "layers.*.mlp_norm.weight": f"{layer}.ffn_norm.weight",
        "layers.*.attention.output.weight": f"{attention}.out_proj.weight",
        "layers.*.attention.q_norm.weight": f"{attention}.q_layernorm.weight",
        "layers.*.attention.k_norm.weight": f"{attention}.k_layernorm.weight",
        **hf_linear("layers.*.conv.input", f"{layer}.conv.in_proj"),
        "layers.*.conv.taps": Source(f"{layer}.conv.conv.weight", without_middle_axis),
        "layers.*.conv.bias": f"{layer}.conv.conv.bias",
        **hf_linear("layers.*.conv.output", f"{layer}.conv.out_proj"),
    }
    if config.moe is not None:
        names |= hf_expert_names(config, mlp, gate="w1", up="w3", down="w2")
        names["layers.*.mlp.router.correction_bias"] = f"{mlp}.expert_bias"
    names["layers.*.mlp.gate_up.weight"] = (f"{mlp}.w1.weight", f"{mlp}.w3.weight")
    names["layers.*.mlp.down.weight"] = f"{mlp}.w2.weight"
    return names


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The last norm is called after the embedding; a file may also have it under the usual name."""
    taps = Source("blk.*.shortconv.conv.weight", without_middle_axis)
    return {
        "norm.weight": AnyOf("token_embd_norm.weight", "output_norm.weight"),
        **gguf_linear("conv.input", "shortconv.in_proj"),
        "layers.*.conv.taps": taps,
        "layers.*.conv.bias": "blk.*.shortconv.conv.bias",
        **gguf_linear("conv.output", "shortconv.out_proj"),
    }


def _gguf_layer_types(file: GgufFile) -> list[str]:
    """A layer without KV heads convolves."""
    return [LAYER_TYPES[heads == 0] for heads in file.by_layer("attention.head_count_kv")]


GGUF: Table = {
    "layer_types": _gguf_layer_types,
    "num_key_value_heads": attending_kv_heads,
    "conv_L_cache": optional("shortconv.l_cache", 3),
    "block_auto_adjust_ff_dim": False,
    "rope_theta": optional("rope.freq_base", THETA),
}
MOE_GGUF: Table = (
    GGUF
    | GGUF_EXPERTS
    | {
        "num_dense_layers": optional("leading_dense_block_count", 0),
        "scoring_func": only("expert_gating_func", SIGMOID, "sigmoid"),
    }
)


LFM2 = Family(
    name="LFM2",
    models="LFM2, LFM2.5",
    architectures=("Lfm2ForCausalLM",),
    model_types=("lfm2",),
    layer_types=LAYER_TYPES,
    from_hf=from_hf,
    gguf_architectures=("lfm2",),
    gguf=GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)

LFM2_MOE = Family(
    name="LFM2 MoE",
    models="LFM2-8B-A1B",
    architectures=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    layer_types=LAYER_TYPES,
    from_hf=moe_from_hf,
    gguf_architectures=("lfm2moe",),
    gguf=MOE_GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
