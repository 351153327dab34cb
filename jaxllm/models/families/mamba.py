"""State-space layers: their keys and tensors' names in all families, Mamba-2, Falcon-H1, Granite 4 and Granite 3."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_experts, hf_head_dim, hf_rope
from jaxllm.models.gguf import ABSENT, GgufFile, Table, nonzero, optional
from jaxllm.models.layers.recurrent import SSDConfig
from jaxllm.models.names import in_layers, linear, permuted_names
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern, Source, without_middle_axis


# What families with state-space layers spell alike: keys of GGUF files, limits of config.json, names of tensors
def hf_time_step_limits(c: dict[str, Any]) -> dict[str, Any]:
    """`time_step_limit`, where infinity is an object. Raises CheckpointError unless it is two numbers in order."""
    given = c.get("time_step_limit")
    if given is None:
        return {}
    limits: list[Any] = [one.get("__float__") if isinstance(one, dict) else one for one in given]
    limits = [float("inf") if one == "Infinity" else one for one in limits]
    if len(limits) != 2 or not all(type(one) in (int, float) for one in limits) or not 0 <= limits[0] < limits[1]:
        raise CheckpointError(
            f"time_step_limit is {shown(given)}; accepted are two numbers, the first of them 0 or more and the second "
            "greater"
        )
    least, most = map(float, limits)
    return {"dt_min": least, "dt_max": None if math.isinf(most) else most}


def check_activation(c: dict[str, Any], name: str) -> None:
    """Raises CheckpointError where the key `name` asks for another activation than silu."""
    if c.get(name, "silu") not in (None, "silu"):
        raise CheckpointError(f"{name} is {shown(c[name])}; accepted is 'silu' in a state-space layer")


def check_sizes(name: str, head_dim: int, heads: int, inner: int) -> None:
    """Raises CheckpointError where the `heads`, of `head_dim` channels under the key `name`, do not make `inner`."""
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{name} is {head_dim}, which {heads} state-space heads have; accepted is a size with which these have "
            f"{inner} channels together"
        )


def gguf_ssd_head_dim(file: GgufFile) -> int:
    """Channels of a state-space head of a GGUF file. Raises CheckpointError where the sizes do not go together."""
    inner, heads = file("ssm.inner_size"), file("ssm.time_step_rank")
    if inner % heads:
        raise CheckpointError(f"ssm.inner_size is {inner}; accepted is a multiple of {heads} heads")
    return inner // heads


def mamba_ssd(c: dict[str, Any], inner: int, *, output_bias: bool, **differences: Any) -> SSDConfig:
    """State-space layers of `inner` channels, by the `mamba_…` keys of Granite 4 and Falcon-H1."""
    check_activation(c, "hidden_act")
    heads = c["mamba_n_heads"]
    head_dim = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    check_sizes("mamba_d_head", head_dim, heads, inner)
    return SSDConfig(
        heads=heads, head_dim=head_dim, state_size=c.get("mamba_d_state", 256), groups=c.get("mamba_n_groups", 1),
        kernel=c.get("mamba_d_conv", 4), conv_bias=bool(c.get("mamba_conv_bias", True)),
        bias=bool(c.get("mamba_proj_bias")), output_bias=output_bias, **hf_time_step_limits(c), **differences,
    )  # fmt: skip


MAMBA_GGUF: Table = {  # the same keys in GGUF files
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": gguf_ssd_head_dim,
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}


def hf_ssd_names(config: DecoderConfig, block: str) -> dict[str, Pattern]:
    """Tensors of the state-space layer `block` in a Hugging Face checkpoint."""
    return {
        **_input_names(config, f"{block}.in_proj"),
        "layers.*.ssd.taps": Source(f"{block}.conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": f"{block}.conv1d.bias",
        "layers.*.ssd.fade": Source(f"{block}.A_log", lambda logarithm: np.exp(np.asarray(logarithm, np.float32))),
        "layers.*.ssd.dt_bias": f"{block}.dt_bias",
        "layers.*.ssd.skip": f"{block}.D",
        "layers.*.ssd.norm.weight": f"{block}.norm.weight",
        **linear("layers.*.ssd.output", f"{block}.out_proj"),
    }


def gguf_ssd_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        **_input_names(config, "blk.*.ssm_in"),
        "layers.*.ssd.taps": Source("blk.*.ssm_conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": "blk.*.ssm_conv1d.bias",
        "layers.*.ssd.fade": Source("blk.*.ssm_a", lambda array: -np.asarray(array, np.float32).reshape(-1)),
        "layers.*.ssd.dt_bias": "blk.*.ssm_dt.bias",
        "layers.*.ssd.skip": Source("blk.*.ssm_d", _flat),
        "layers.*.ssd.norm.weight": Source("blk.*.ssm_norm.weight", _flat),
        **linear("layers.*.ssd.output", "blk.*.ssm_out"),
    }


def _input_names(config: DecoderConfig, tensor: str) -> dict[str, Pattern]:
    """The last rows of one tensor, one a head, are a product by themselves."""
    heads = config.ssd.heads if config.ssd else 0
    parts = {"input": partial(_rows, end=-heads), "dt": partial(_rows, begin=-heads)}
    return {
        f"layers.*.ssd.{path}.{kind}": Source(f"{tensor}.{kind}", rows, by_rows=kind == "weight")
        for path, rows in parts.items()
        for kind in ("weight", "bias")
    }


def _rows(array: np.ndarray, begin: int | None = None, end: int | None = None) -> np.ndarray:
    return array[begin:end]


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


# Mamba-2: state-space layers alone, without attention or MLPs
CONTEXT = 2**20  # Tokens. A state has no longest context; this is what llama.cpp writes into files.


def mamba2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = {"num_heads": 128, "head_dim": 64, "hidden_size": 4096, "expand": 2} | c
    check_sizes("head_dim", c["head_dim"], c["num_heads"], c["expand"] * c["hidden_size"])
    check_activation(c, "hidden_act")
    ssd = SSDConfig(
        heads=c["num_heads"], head_dim=c["head_dim"], state_size=c.get("state_size", 128), groups=c.get("n_groups", 8),
        kernel=c.get("conv_kernel", 4), conv_bias=bool(c.get("use_conv_bias", True)),
        bias=bool(c.get("use_bias", False)), output_bias=bool(c.get("use_bias", False)), **hf_time_step_limits(c),
    )  # fmt: skip
    return DecoderConfig(
        vocab_size=c["vocab_size"], hidden_size=c["hidden_size"],
        layers=(LayerKind(None, mixer="ssd", mlp=False),) * c["num_hidden_layers"],
        norm_eps=c.get("layer_norm_epsilon", 1e-5), tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        ssd=ssd, max_position_embeddings=c.get("max_position_embeddings", CONTEXT), intermediate_size=0, num_heads=0,
        num_kv_heads=0, head_dim=0,
    )  # fmt: skip


def mamba2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        "embed.weight": AnyOf("backbone.embeddings.weight", "backbone.embedding.weight"),
        **linear("norm", "backbone.norm_f"),
        "layers.*.attention_norm.weight": "backbone.layers.*.norm.weight",
        **hf_ssd_names(config, "backbone.layers.*.mixer"),
    }


MAMBA2 = Family(
    name="Mamba-2", models="Mamba-2, Codestral Mamba",
    architectures=("Mamba2ForCausalLM",), model_types=("mamba2",), gguf_architectures=("mamba2",),
    from_hf=mamba2_from_hf, hf_names=mamba2_hf_names,
    gguf={
        **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), ABSENT),  # 0 in a file
        "num_heads": "ssm.time_step_rank",
        "head_dim": gguf_ssd_head_dim,
        "expand": lambda file: file("ssm.inner_size") // file("embedding_length"),
        "state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "conv_kernel": "ssm.conv_kernel",
        "partial_rotary_factor": ABSENT,
    },
    gguf_names=gguf_ssd_names,
)  # fmt: skip


# Falcon-H1: attention and a state-space layer side by side in each layer, and a factor on nearly everything
FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def falcon_h1_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Factors on queries and keys are one on the logits; those on the inputs of products are on their outputs."""
    defaults: dict[str, Any] = {
        "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2,
    }  # fmt: skip
    c = defaults | c
    factor = {name: float(c.get(name) or 1.0) for name in FACTORS}
    gate, down = c.get("mlp_multipliers") or (1.0, 1.0)
    into, bias = factor["attention_in_multiplier"], bool(c.get("attention_bias"))
    _check_bias("attention_in_multiplier", into, "attention_bias", bias)
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c), mixer="attention_beside_ssd"), attention_bias=bias, mlp_bias=c.get("mlp_bias"),
        ssd=_falcon_h1_ssd(c, factor["ssm_in_multiplier"], factor["ssm_out_multiplier"]),
        embedding_scale=factor["embedding_multiplier"], logit_scale=factor["lm_head_multiplier"],
        attention_scale=hf_head_dim(c) ** -0.5 * into * into * factor["key_multiplier"],
        attention_out_scale=into * factor["attention_out_multiplier"], mlp_gate_scale=float(gate),
        mlp_out_scale=float(down),
    )  # fmt: skip


def _check_bias(factor: str, value: float, flag: str, bias: bool) -> None:
    """A factor on the input of a product with a bias is not one on its output."""
    if bias and value != 1.0:
        raise CheckpointError(f"{factor} is {value}; accepted is 1 where {flag} is true")


def _falcon_h1_ssd(c: dict[str, Any], into: float, out: float) -> SSDConfig:
    inner = c["mamba_expand"] * c["hidden_size"] if c["mamba_d_ssm"] is None else c["mamba_d_ssm"]
    _check_bias("ssm_in_multiplier", into, "mamba_proj_bias", bool(c.get("mamba_proj_bias")))
    before = "before_gate" if c.get("mamba_norm_before_gate", True) else "after_gate"
    return mamba_ssd(
        c, inner, output_bias=bool(c.get("projectors_bias")), norm=before if c.get("mamba_rms_norm") else None,
        scales=tuple(into * factor for factor in c.get("ssm_multipliers") or (1.0,) * 5), out_scale=out,
    )  # fmt: skip


def falcon_h1_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        "norm.weight": "model.final_layernorm.weight",
        **in_layers("model.layers.*", {
            "mlp_norm": "pre_ff_layernorm", "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
            "mlp.down": "feed_forward.down_proj",
        }),
        **hf_ssd_names(config, "model.layers.*.mamba"),
    }  # fmt: skip


def falcon_h1_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """llama.cpp calls one norm without saying that it is a weight."""
    norm = AnyOf("blk.*.ffn_norm", "blk.*.ffn_norm.weight")
    return gguf_ssd_names(config) | {"layers.*.mlp_norm.weight": norm}


FALCON_H1 = Family(
    name="Falcon-H1", models="Falcon-H1 (0.5B to 34B), Falcon-H1R",
    architectures=("FalconH1ForCausalLM",), model_types=("falcon_h1",), gguf_architectures=("falcon-h1",),
    from_hf=falcon_h1_from_hf, hf_names=falcon_h1_hf_names,
    gguf=MAMBA_GGUF | {"mamba_d_ssm": "ssm.inner_size"},  # All factors are in the weights of such a file.
    gguf_names=falcon_h1_gguf_names,
)  # fmt: skip


# Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits
def hf_scales(c: dict[str, Any]) -> dict[str, Any]:
    """DecoderConfig's factors. Logits are divided by `logits_scaling`."""
    return {
        "embedding_scale": float(c.get("embedding_multiplier", 1.0)),
        "attention_scale": float(c.get("attention_multiplier", 1.0)),
        "residual_scale": float(c.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / c.get("logits_scaling", 1.0),
    }


GRANITE_GGUF: Table = {  # a factor of 0 is none
    "embedding_multiplier": nonzero("embedding_scale", 1.0),
    "attention_multiplier": lambda file: file("attention.scale", 0) or file.head_dim**-0.5,
    "residual_multiplier": nonzero("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}


def granite_from_hf(c: dict[str, Any]) -> DecoderConfig:
    bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)
    return hf_decoder(c, attention_bias=bias, mlp_bias=mlp_bias, **hf_scales(c))


GRANITE = Family(
    name="Granite 3", models="Granite 3.0, 3.1, 3.2, 3.3",
    architectures=("GraniteForCausalLM",), model_types=("granite",), gguf_architectures=("granite",),
    from_hf=granite_from_hf, gguf=GRANITE_GGUF, gguf_names=permuted_names,
)  # fmt: skip


# Granite 4: state-space layers, and attention in every few layers, mostly without positions; dense, or with experts
ATTENTION = ("attention", "full_attention")
GRANITE4_LAYER_TYPES = (*ATTENTION, "mamba", "linear_attention")  # as checkpoints call them, and as transformers does


def granite4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A model without experts has the shared MLP alone. With them there is a softmax over the chosen ones' logits."""
    defaults: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 11_008, "shared_intermediate_size": 1024, "num_local_experts": 8,
        "num_experts_per_tok": 2, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2,
    }  # fmt: skip
    c = defaults | c
    kinds = c.get("layer_types") or ["mamba"] * c["num_hidden_layers"]
    positions = c.get("position_embedding_type")
    if positions not in ("rope", "nope", None):
        raise CheckpointError(f"position_embedding_type is {shown(positions)}; accepted is one of rope, nope or null")
    rope = hf_rope(c) if positions == "rope" else None
    sparse, shared = bool(c["num_local_experts"]), c["shared_intermediate_size"]
    attending, states = LayerKind(rope, sparse=sparse), LayerKind(None, sparse=sparse, mixer="ssd")
    layers = [attending if kind in ATTENTION else states for kind in kinds]
    moe = ssd = None
    if sparse:
        moe = hf_experts(c, "num_local_experts", "intermediate_size", renormalize=True, shared_hidden=shared)
    if states in layers:
        ssd = mamba_ssd(c, c["mamba_expand"] * c["hidden_size"], output_bias=bool(c.get("mamba_proj_bias")))
    return hf_decoder(
        c, layers=layers, intermediate_size=shared, attention_bias=c.get("attention_bias"), moe=moe, ssd=ssd,
        **hf_scales(c),
    )  # fmt: skip


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


def attending_kv_heads(file: GgufFile) -> int:
    """The KV heads of each layer that has any. Raises CheckpointError where they differ, or no layer has."""
    heads = file.by_layer("attention.head_count_kv")
    if len(set(heads) - {0}) != 1:
        raise CheckpointError(
            f"attention.head_count_kv is {shown(heads)}; accepted is 0 or one and the same in each layer"
        )
    return max(heads)


GRANITE4 = Family(
    name="Granite 4", models="Granite 4.0 (H Micro, Tiny, Small; Micro; 1B, 350M)",
    architectures=("GraniteMoeHybridForCausalLM",), model_types=("granitemoehybrid",),
    layer_types=GRANITE4_LAYER_TYPES,
    from_hf=granite4_from_hf, hf_names=granite4_hf_names, gguf_architectures=("granitehybrid",),
    # Rows of queries and keys are moved, though mostly nothing rotates them.
    gguf_names=lambda config: permuted_names(config) | gguf_ssd_names(config),
    # A layer without KV heads is a state-space layer. Rotary embeddings are there unless a key says that they are not,
    # which llama.cpp has for another purpose.
    gguf=GRANITE_GGUF | MAMBA_GGUF | {
        "layer_types": lambda file: ["attention" if n else "mamba" for n in file.by_layer("attention.head_count_kv")],
        "num_key_value_heads": attending_kv_heads,
        "position_embedding_type": lambda file: "rope" if file("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": optional("expert_count", 0),
        "num_experts_per_tok": optional("expert_used_count", 0),
        "shared_intermediate_size": lambda file: file(
            "expert_shared_feed_forward_length" if file("expert_count", 0) else "feed_forward_length"
        ),
        "mamba_expand": lambda file: file("ssm.inner_size") // file("embedding_length"),
    },
)  # fmt: skip
