"""Models with attention in every few layers: Granite 4, with Granite 3 that it grew from, and LFM2."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.mamba import (
    check_activation,
    check_sizes,
    gguf_ssd_head_dim,
    gguf_ssd_names,
    hf_ssd_names,
    hf_time_step_limits,
)
from jaxllm.models.family import Family, hf_expert_names, hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.gguf import GGUF_EXPERTS, GgufFile, Table, nonzero, only, optional
from jaxllm.models.gguf_names import gguf_linear, permuted_names
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.models.layers.recurrent import ConvConfig, SSDConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern, Source, without_middle_axis

# Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits


def hf_scales(c: dict[str, Any]) -> dict[str, float]:
    """DecoderConfig's factors. Logits are divided by `logits_scaling`."""
    return {
        "embedding_scale": float(c.get("embedding_multiplier", 1.0)),
        "attention_scale": float(c.get("attention_multiplier", 1.0)),
        "residual_scale": float(c.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / c.get("logits_scaling", 1.0),
    }


GRANITE_GGUF: Table = {
    "embedding_multiplier": nonzero("embedding_scale", 1.0),
    "attention_multiplier": lambda file: file("attention.scale", 0) or file.head_dim**-0.5,
    "residual_multiplier": nonzero("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}
"""A factor of 0 is none."""


def granite_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Biases on attention are on all of its products."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False), **hf_scales(c))
    )


GRANITE = Family(
    name="Granite 3",
    models="Granite 3.0, 3.1, 3.2, 3.3",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=granite_from_hf,
    gguf_architectures=("granite",),
    gguf=GRANITE_GGUF,
    gguf_names=permuted_names,
)


# Granite 4: state-space layers, and attention in every few layers, mostly without positions; dense, or with experts

GRANITE4_LAYER_TYPES = ("mamba", "attention", "linear_attention", "full_attention")
"""As checkpoints call them, and as transformers does."""
ATTENTION = ("attention", "full_attention")
GRANITE4_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
}


def granite4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A model without experts has the shared MLP alone."""
    c = GRANITE4_DEFAULTS | c
    kinds = c.get("layer_types") or ["mamba"] * c["num_hidden_layers"]
    positions = c.get("position_embedding_type")
    if positions not in ("rope", "nope", None):
        raise CheckpointError(f"position_embedding_type is {shown(positions)}; accepted is one of rope, nope or null")
    rope = hf_rope(c, hf_head_dim(c)) if positions == "rope" else None
    sparse = bool(c["num_local_experts"])
    attending, states = LayerKind(rope, sparse=sparse), LayerKind(None, sparse=sparse, mixer="ssd")
    layers = tuple(attending if kind in ATTENTION else states for kind in kinds)
    bias = bool(c.get("attention_bias"))
    dense = {"intermediate_size": c["shared_intermediate_size"]}
    return DecoderConfig(
        **hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **hf_scales(c), **dense),
        moe=_moe(c) if sparse else None,
        ssd=_ssd(c) if states in layers else None,
    )


def _moe(c: dict[str, Any]) -> MoEConfig:
    """A softmax over the logits of the chosen experts."""
    return MoEConfig(
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
        hidden=c["intermediate_size"],
        renormalize=True,
        shared_hidden=c["shared_intermediate_size"],
    )


def _ssd(c: dict[str, Any]) -> SSDConfig:
    check_activation(c, "hidden_act")
    inner, heads = c["mamba_expand"] * c["hidden_size"], c["mamba_n_heads"]
    head_dim = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    check_sizes("mamba_d_head", head_dim, heads, inner)
    return SSDConfig(
        heads=heads,
        head_dim=head_dim,
        state_size=c.get("mamba_d_state", 256),
        groups=c.get("mamba_n_groups", 1),
        kernel=c.get("mamba_d_conv", 4),
        conv_bias=bool(c.get("mamba_conv_bias", True)),
        bias=bool(c.get("mamba_proj_bias", False)),
        output_bias=bool(c.get("mamba_proj_bias", False)),
        **hf_time_step_limits(c),
    )


def granite4_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Gate and up are one tensor; experts are stacked, under the names of the checkpoints or of transformers 5."""
    layer, experts = "model.layers.*", "model.layers.*.block_sparse_moe"
    shared = "mlp.shared" if config.moe else "mlp"
    return {
        **hf_ssd_names(config, f"{layer}.mamba"),
        f"layers.*.{shared}.gate_up.weight": f"{layer}.shared_mlp.input_linear.weight",
        f"layers.*.{shared}.down.weight": f"{layer}.shared_mlp.output_linear.weight",
        "layers.*.mlp.router.weight": AnyOf(f"{experts}.router.layer.weight", f"{experts}.router.weight"),
        "layers.*.mlp.experts.gate_up.weight": AnyOf(
            f"{experts}.input_linear.weight", f"{experts}.experts.gate_up_proj"
        ),
        "layers.*.mlp.experts.down.weight": AnyOf(f"{experts}.output_linear.weight", f"{experts}.experts.down_proj"),
    }


def granite4_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Rows of queries and keys are moved, though mostly nothing rotates them."""
    return permuted_names(config) | gguf_ssd_names(config)


def attending_kv_heads(file: GgufFile) -> int:
    """The KV heads of each layer that has any. Raises CheckpointError where they differ, or no layer has."""
    heads = file.by_layer("attention.head_count_kv")
    if len(set(heads) - {0}) != 1:
        raise CheckpointError(
            f"attention.head_count_kv is {shown(heads)}; accepted is 0 or one and the same in each layer"
        )
    return max(heads)


GRANITE4_GGUF: Table = {
    **GRANITE_GGUF,
    "layer_types": lambda file: ["attention" if n else "mamba" for n in file.by_layer("attention.head_count_kv")],
    "num_key_value_heads": attending_kv_heads,
    "position_embedding_type": lambda file: "rope" if file("rope.scaling.finetuned", True) else "nope",
    "num_local_experts": optional("expert_count", 0),
    "num_experts_per_tok": optional("expert_used_count", 0),
    "shared_intermediate_size": lambda file: file(
        "expert_shared_feed_forward_length" if file("expert_count", 0) else "feed_forward_length"
    ),
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": gguf_ssd_head_dim,
    "mamba_expand": lambda file: file("ssm.inner_size") // file("embedding_length"),
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
"""A layer without KV heads is a state-space layer.

Rotary embeddings are there unless a key says that they are not, which llama.cpp has for another purpose.
"""


GRANITE4 = Family(
    name="Granite 4",
    models="Granite 4.0 (H Micro, Tiny, Small; Micro; 1B, 350M)",
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    layer_types=GRANITE4_LAYER_TYPES,
    from_hf=granite4_from_hf,
    gguf_architectures=("granitehybrid",),
    gguf=GRANITE4_GGUF,
    hf_names=granite4_hf_names,
    gguf_names=granite4_gguf_names,
)


# LFM2 of Liquid AI: short convolutions, and attention in every few layers; dense, or with experts (8B-A1B)

LFM2_LAYER_TYPES = ("full_attention", "conv")
LFM2_THETA = 1_000_000.0
SIGMOID = 2
"""`expert_gating_func` of GGUF files."""
ROUTER_EPS = 1e-6
"""Added to the sum that the chosen experts' scores are divided by."""


def lfm2_from_hf(c: dict[str, Any]) -> DecoderConfig:
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
    rope = hf_rope(c, hf_head_dim(c), theta=LFM2_THETA)
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


def lfm2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
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


def lfm2_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
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
    return [LFM2_LAYER_TYPES[heads == 0] for heads in file.by_layer("attention.head_count_kv")]


LFM2_GGUF: Table = {
    "layer_types": _gguf_layer_types,
    "num_key_value_heads": attending_kv_heads,
    "conv_L_cache": optional("shortconv.l_cache", 3),
    "block_auto_adjust_ff_dim": False,
    "rope_theta": optional("rope.freq_base", LFM2_THETA),
}
MOE_GGUF: Table = (
    LFM2_GGUF
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
    layer_types=LFM2_LAYER_TYPES,
    from_hf=lfm2_from_hf,
    gguf_architectures=("lfm2",),
    gguf=LFM2_GGUF,
    hf_names=lfm2_hf_names,
    gguf_names=lfm2_gguf_names,
)

LFM2_MOE = Family(
    name="LFM2 MoE",
    models="LFM2-8B-A1B",
    architectures=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    layer_types=LFM2_LAYER_TYPES,
    from_hf=moe_from_hf,
    gguf_architectures=("lfm2moe",),
    gguf=MOE_GGUF,
    hf_names=lfm2_hf_names,
    gguf_names=lfm2_gguf_names,
)
