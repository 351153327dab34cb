"""Models of unlike layers: Nemotron-H, whose layers are one block each, and LFM2, which mostly has convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families import deepseek, mamba
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_rope
from jaxllm.models.gguf import ABSENT, GGUF_EXPERTS, GgufFile, Table, only, optional, with_experts
from jaxllm.models.hf_fields import LAYERS
from jaxllm.models.layers.recurrent import ConvConfig, SSDConfig
from jaxllm.models.names import hf_expert_names, in_layers, permuted_names
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern, Source, without_middle_axis

# Nemotron-H and Nemotron 3: layers that are one block each: state-space, attention without positions, MLP, experts
MLP, EXPERTS = LayerKind(None, mixer=None), LayerKind(None, mixer=None, sparse=True)
STATES, ATTENTION = LayerKind(None, mixer="ssd", mlp=False), LayerKind(None, mlp=False)
KINDS = {"mamba": STATES, "attention": ATTENTION, "mlp": MLP, "moe": EXPERTS}
KINDS |= {"linear_attention": STATES, "full_attention": ATTENTION}
LETTERS = {"M": STATES, "*": ATTENTION, "-": MLP, "E": EXPERTS}
UNREAD = {"attention_bias": ((None, False), "null or false"), "sliding_window": ((None,), "null")}
"""Keys that transformers has, and that its layers do not look at."""


def nemotron_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The number of layers is that of the pattern, or of the list that has its place in newer files.

    A step's length is kept within `time_step_limit`, as in NVIDIA's own code. transformers 5.24 keeps it above
    `time_step_min` too, in prompts and not in answers.
    """
    defaults: dict[str, Any] = {
        "vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 4096, "intermediate_size": 21_504, "mlp_hidden_act": "relu2", "mamba_num_heads": 128,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
        "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "head_dim": c.get("attention_head_dim") or 128,
    }  # fmt: skip
    c = defaults | c
    mamba.check_activation(c, "mamba_hidden_act")
    for name, (values, accepted) in UNREAD.items():
        if c.get(name) not in values:
            raise CheckpointError(f"{name} is {shown(c[name])}; accepted is {accepted}")
    layers = _nemotron_layers(c)
    sparse = any(layer.sparse for layer in layers)
    if sparse and c.get("mlp_bias"):
        raise CheckpointError("mlp_bias is True; accepted is false in a model with experts")
    moe = None
    if sparse:  # DeepSeek V3's router, over experts without gates, which may work on a projection
        shared, latent = c["moe_shared_expert_intermediate_size"], c.get("moe_latent_size") or 0
        moe = replace(deepseek.sigmoid_experts(c), shared_hidden=shared, gated=False, latent=latent)
    return hf_decoder(
        c, layers=layers, norm_eps=c.get("layer_norm_epsilon", 1e-5), hidden_act=c["mlp_hidden_act"], gated_mlp=False,
        mlp_bias=c.get("mlp_bias"), moe=moe, ssd=_nemotron_ssd(c) if STATES in layers else None,
    )  # fmt: skip


def _nemotron_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    """`layers_block_type`, also called `layer_types`, goes before the pattern of letters."""
    kinds, pattern = c.get("layers_block_type") or c.get("layer_types"), c.get("hybrid_override_pattern")
    if kinds:
        return tuple(KINDS[kind] for kind in kinds)
    if not pattern:
        return STATES, EXPERTS, ATTENTION, MLP
    if not LAYERS.fits(len(pattern)) or set(pattern) - set(LETTERS):
        raise CheckpointError(
            f"hybrid_override_pattern is {shown(pattern)}; accepted is a letter for each layer, of {' '.join(LETTERS)}"
        )
    return tuple(LETTERS[letter] for letter in pattern)


def _nemotron_ssd(c: dict[str, Any]) -> SSDConfig:
    bias = bool(c.get("use_bias"))
    return SSDConfig(
        heads=c["mamba_num_heads"], head_dim=c["mamba_head_dim"], state_size=c["ssm_state_size"], groups=c["n_groups"],
        kernel=c["conv_kernel"], conv_bias=bool(c["use_conv_bias"]), bias=bias, output_bias=bias,
        **mamba.hf_time_step_limits(c),
    )  # fmt: skip


def nemotron_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """As in published checkpoints, or as transformers 5 calls them."""
    first, second = _nemotron_names(config, "backbone"), _nemotron_names(config, "model")
    return {path: AnyOf(*_options(first[path]), *_options(second[path])) for path in first}


def _options(pattern: Pattern) -> tuple[Any, ...]:
    return pattern.options if isinstance(pattern, AnyOf) else (pattern,)


def _nemotron_names(config: DecoderConfig, model: str) -> dict[str, Pattern]:
    block = f"{model}.layers.*.mixer"
    names: dict[str, Pattern] = {
        "embed.weight": f"{model}.embeddings.weight",
        "norm.weight": f"{model}.norm_f.weight",
        **in_layers(f"{model}.layers.*", {"attention_norm": "norm", "mlp_norm": "norm"}),
        **in_layers(block, {
            "attention.qkv": ("q_proj", "k_proj", "v_proj"), "attention.output": "o_proj", "mlp.up": "up_proj",
            "mlp.down": "down_proj", "mlp.router": "gate", "mlp.latent_down": "fc1_latent_proj",
            "mlp.latent_up": "fc2_latent_proj", "mlp.shared.up": "shared_experts.up_proj",
            "mlp.shared.down": "shared_experts.down_proj",
        }),
        "layers.*.mlp.router.correction_bias": f"{block}.gate.e_score_correction_bias",
        **mamba.hf_ssd_names(config, block),
    }  # fmt: skip
    experts = f"{block}.experts"
    for part in ("up", "down"):
        each = Source(f"{experts}.{{}}.{part}_proj.weight", stack=config.moe.num_experts if config.moe else 0)
        names[f"layers.*.mlp.experts.{part}.weight"] = AnyOf(each, f"{experts}.{part}_proj")
    return names


def nemotron_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Each layer has one norm; rows of queries and keys are moved, though nothing rotates them."""
    own = {"mlp_norm": "attn_norm", "mlp.latent_down": "ffn_latent_down", "mlp.latent_up": "ffn_latent_up"}
    return permuted_names(config) | mamba.gguf_ssd_names(config) | in_layers("blk.*", own)


def _gguf_kinds(file: GgufFile) -> list[str]:
    """A layer with KV heads attends, one with an MLP's size has that or experts, and the others have states."""
    kv_heads, sizes = file.by_layer("attention.head_count_kv"), file.by_layer("feed_forward_length")
    experts = [file.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(file.num_layers)]
    return [
        "attention" if heads else "mamba" if not size else "moe" if sparse else "mlp"
        for heads, size, sparse in zip(kv_heads, sizes, experts, strict=True)
    ]


def _one_of_all(key: str, values: list[int]) -> int | None:
    """The one value that a key has in the layers where it is not 0; None where it is 0 in all."""
    different = sorted(set(values) - {0})
    if len(different) > 1:
        raise CheckpointError(f"{key} is {shown(different)} in layers that have one; accepted is the same in each")
    return different[0] if different else None


def _gguf_mlp_size(file: GgufFile) -> int:
    sizes = zip(file.by_layer("feed_forward_length"), _gguf_kinds(file), strict=True)
    dense = _one_of_all("feed_forward_length", [size for size, kind in sizes if kind == "mlp"])
    return dense or file("expert_feed_forward_length", 0)


def _gguf_kv_heads(file: GgufFile) -> int:
    key = "attention.head_count_kv"
    return _one_of_all(key, file.by_layer(key)) or file("attention.head_count")


NEMOTRON_GGUF: Table = {
    "layers_block_type": _gguf_kinds,
    "intermediate_size": _gguf_mlp_size,
    "num_key_value_heads": _gguf_kv_heads,
    "mamba_num_heads": "ssm.time_step_rank",
    "mamba_head_dim": mamba.gguf_ssd_head_dim,
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    **with_experts(deepseek.ROUTED_GGUF | {
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": ABSENT,
        "moe_latent_size": optional("moe_latent_size", 0),
    }),
}  # fmt: skip

NEMOTRON_H = Family(
    name="Nemotron-H", models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
    architectures=("NemotronHForCausalLM",), model_types=("nemotron_h",), layer_types=tuple(KINDS),
    from_hf=nemotron_from_hf, hf_names=nemotron_hf_names,
    gguf_architectures=("nemotron_h", "nemotron_h_moe"), gguf=NEMOTRON_GGUF, gguf_names=nemotron_gguf_names,
)  # fmt: skip


# LFM2 of Liquid AI: short convolutions, and attention in every few layers; dense, or with experts (8B-A1B)
LFM2_LAYER_TYPES = ("full_attention", "conv")
LFM2_THETA = 1_000_000.0


def lfm2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Which layers attend is said by `layer_types` or, in older files, by `full_attn_idxs`."""
    every = list(range(c["num_hidden_layers"]))
    attending = every if c.get("full_attn_idxs") is None else c["full_attn_idxs"]
    kinds = c.get("layer_types") or ["full_attention" if i in attending else "conv" for i in every]
    return _lfm2(c | {"intermediate_size": _mlp_size(c)}, kinds, len(kinds))


def lfm2_moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The first `num_dense_layers` have no experts. A bias has a say in who is chosen, and none in the weights."""
    c = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2} | c
    moe = hf_experts(
        c, "num_experts", "moe_intermediate_size", scoring="sigmoid", correction_bias=c.get("use_expert_bias", True),
        renormalize=bool(c.get("norm_topk_prob", True)), renormalize_eps=1e-6,
        scale=c.get("routed_scaling_factor", 1.0),
    )  # fmt: skip
    kinds = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
    return _lfm2(c, kinds, c["num_dense_layers"], moe=moe)


def _lfm2(c: dict[str, Any], kinds: list[str], num_dense: int, **differences: Any) -> DecoderConfig:
    rope = hf_rope(c, theta=LFM2_THETA)
    layers = [
        LayerKind(
            None if kind == "conv" else rope, sparse=i >= num_dense, mixer="conv" if kind == "conv" else "attention"
        )
        for i, kind in enumerate(kinds)
    ]
    return hf_decoder(
        {"max_position_embeddings": 128_000, "num_key_value_heads": 8} | c, layers=layers,
        norm_eps=c.get("norm_eps", 1e-5), hidden_act="silu",
        tie_word_embeddings=c.get("tie_embedding", c.get("tie_word_embeddings", True)), qk_norm="rms",
        conv=ConvConfig(c.get("conv_L_cache", 3), bias=bool(c.get("conv_bias", False))), **differences,
    )  # fmt: skip


def _mlp_size(c: dict[str, Any]) -> int:
    """`block_auto_adjust_ff_dim` says that two thirds of the stated size are meant, rounded up to whole multiples."""
    size = c.get("block_ff_dim", c.get("intermediate_size", 12_288))
    if not c.get("block_auto_adjust_ff_dim", True):
        return size
    size, unit = int(2 * size / 3), c.get("block_multiple_of", 256)
    factor = c.get("block_ffn_dim_multiplier", 1.0)
    return size if factor is None else -(-int(factor * size) // unit) * unit


def lfm2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    layer, mlp = "model.layers.*", "model.layers.*.feed_forward"
    return {
        "norm.weight": "model.embedding_norm.weight",
        **hf_expert_names(config, mlp, gate="w1", up="w3", down="w2"),
        "layers.*.mlp.router.correction_bias": f"{mlp}.expert_bias",
        **in_layers(layer, {
            "attention_norm": "operator_norm", "mlp_norm": "ffn_norm", "attention.output": "self_attn.out_proj",
            "attention.q_norm": "self_attn.q_layernorm", "attention.k_norm": "self_attn.k_layernorm",
            "conv.input": "conv.in_proj", "conv.output": "conv.out_proj",
            "mlp.gate_up": ("feed_forward.w1", "feed_forward.w3"), "mlp.down": "feed_forward.w2",
        }),
        "layers.*.conv.taps": Source(f"{layer}.conv.conv.weight", without_middle_axis),
        "layers.*.conv.bias": f"{layer}.conv.conv.bias",
    }  # fmt: skip


LFM2_GGUF_NAMES: dict[str, Pattern] = {  # the last norm may be named after the embedding
    "norm.weight": AnyOf("token_embd_norm.weight", "output_norm.weight"),
    **in_layers("blk.*", {"conv.input": "shortconv.in_proj", "conv.output": "shortconv.out_proj"}),
    "layers.*.conv.taps": Source("blk.*.shortconv.conv.weight", without_middle_axis),
    "layers.*.conv.bias": "blk.*.shortconv.conv.bias",
}


LFM2_GGUF: Table = {
    # A layer without KV heads convolves.
    "layer_types": lambda file: [LFM2_LAYER_TYPES[n == 0] for n in file.by_layer("attention.head_count_kv")],
    "num_key_value_heads": mamba.attending_kv_heads,
    "conv_L_cache": optional("shortconv.l_cache", 3),
    "block_auto_adjust_ff_dim": False,
    "rope_theta": optional("rope.freq_base", LFM2_THETA),
}

LFM2 = Family(
    name="LFM2", models="LFM2, LFM2.5, LFM2-VL (text)",
    architectures=("Lfm2ForCausalLM", "Lfm2VlForConditionalGeneration"),
    model_types=("lfm2",), wrappers=("lfm2_vl",), layer_types=LFM2_LAYER_TYPES,
    from_hf=lfm2_from_hf, hf_names=lfm2_hf_names,
    gguf_architectures=("lfm2",), gguf=LFM2_GGUF, gguf_names=LFM2_GGUF_NAMES,
)  # fmt: skip

LFM2_MOE = Family(
    name="LFM2 MoE", models="LFM2-8B-A1B",
    architectures=("Lfm2MoeForCausalLM",), model_types=("lfm2_moe",), layer_types=LFM2_LAYER_TYPES,
    from_hf=lfm2_moe_from_hf, hf_names=lfm2_hf_names, gguf_architectures=("lfm2moe",), gguf_names=LFM2_GGUF_NAMES,
    gguf=LFM2_GGUF | GGUF_EXPERTS | {
        "num_dense_layers": optional("leading_dense_block_count", 0),
        "scoring_func": only("expert_gating_func", deepseek.SIGMOID, "sigmoid"),
    },
)  # fmt: skip
