"""State-space layers: their keys and tensors' names in all families, Mamba-2 and Falcon-H1."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.gguf import ABSENT, GgufFile, Table
from jaxllm.models.gguf_names import gguf_linear
from jaxllm.models.layers.recurrent import NormPlace, SSDConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern, Source, without_middle_axis

# What families with state-space layers spell alike: keys of GGUF files, limits of config.json, names of tensors


def hf_time_step_limits(c: dict[str, Any]) -> dict[str, Any]:
    """What `time_step_limit` keeps a step's length within; transformers writes infinity as an object.

    Raises:
        CheckpointError: it is not two numbers in their order.
    """
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


def hf_ssd_names(config: DecoderConfig, block: str) -> dict[str, Pattern]:
    """Tensors of the state-space layer `block` in a Hugging Face checkpoint."""
    return {
        **_input_names(config, f"{block}.in_proj"),
        "layers.*.ssd.taps": Source(f"{block}.conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": f"{block}.conv1d.bias",
        "layers.*.ssd.fade": Source(f"{block}.A_log", _of_logarithm),
        "layers.*.ssd.dt_bias": f"{block}.dt_bias",
        "layers.*.ssd.skip": f"{block}.D",
        "layers.*.ssd.norm.weight": f"{block}.norm.weight",
        **hf_linear("layers.*.ssd.output", f"{block}.out_proj"),
    }


def gguf_ssd_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Where all architectures of GGUF files keep the tensors of state-space layers."""
    return {
        **_input_names(config, "blk.*.ssm_in"),
        "layers.*.ssd.taps": Source("blk.*.ssm_conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": "blk.*.ssm_conv1d.bias",
        "layers.*.ssd.fade": Source("blk.*.ssm_a", _negated),
        "layers.*.ssd.dt_bias": "blk.*.ssm_dt.bias",
        "layers.*.ssd.skip": Source("blk.*.ssm_d", _flat),
        "layers.*.ssd.norm.weight": Source("blk.*.ssm_norm.weight", _flat),
        **gguf_linear("ssd.output", "ssm_out"),
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


def _of_logarithm(logarithm: np.ndarray) -> np.ndarray:
    return np.exp(np.asarray(logarithm, np.float32))


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


def _negated(array: np.ndarray) -> np.ndarray:
    return -np.asarray(array, np.float32).reshape(-1)


# Mamba-2: state-space layers alone, without attention or MLPs

CONTEXT = 2**20
"""Tokens. A state has no longest context; this is what llama.cpp writes into files."""


def mamba2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The defaults are those of the class, whose sizes are Codestral Mamba's."""
    c = {"num_heads": 128, "head_dim": 64, "hidden_size": 4096, "expand": 2} | c
    check_sizes("head_dim", c["head_dim"], c["num_heads"], c["expand"] * c["hidden_size"])
    check_activation(c, "hidden_act")
    ssd = SSDConfig(
        heads=c["num_heads"],
        head_dim=c["head_dim"],
        state_size=c.get("state_size", 128),
        groups=c.get("n_groups", 8),
        kernel=c.get("conv_kernel", 4),
        conv_bias=bool(c.get("use_conv_bias", True)),
        bias=bool(c.get("use_bias", False)),
        output_bias=bool(c.get("use_bias", False)),
        **hf_time_step_limits(c),
    )
    return DecoderConfig(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        layers=(LayerKind(None, mixer="ssd", mlp=False),) * c["num_hidden_layers"],
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        ssd=ssd,
        max_position_embeddings=c.get("max_position_embeddings", CONTEXT),
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
    )


def mamba2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """All names are its own."""
    return {
        "embed.weight": AnyOf("backbone.embeddings.weight", "backbone.embedding.weight"),
        **hf_linear("norm", "backbone.norm_f"),
        "layers.*.attention_norm.weight": "backbone.layers.*.norm.weight",
        **hf_ssd_names(config, "backbone.layers.*.mixer"),
    }


MAMBA2_GGUF: Table = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), ABSENT),
    "num_heads": "ssm.time_step_rank",
    "head_dim": gguf_ssd_head_dim,
    "expand": lambda file: file("ssm.inner_size") // file("embedding_length"),
    "state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "partial_rotary_factor": ABSENT,
}
"""The sizes of attention and MLP that such a file has are all 0."""


MAMBA2 = Family(
    name="Mamba-2",
    models="Mamba-2, Codestral Mamba",
    architectures=("Mamba2ForCausalLM",),
    model_types=("mamba2",),
    from_hf=mamba2_from_hf,
    gguf_architectures=("mamba2",),
    gguf=MAMBA2_GGUF,
    hf_names=mamba2_hf_names,
    gguf_names=gguf_ssd_names,
)


# Falcon-H1: attention and a state-space layer side by side in each layer, and a factor on nearly everything

FALCON_H1_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2,
}  # fmt: skip
FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def falcon_h1_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Factors on queries and keys are one on the logits; those on the inputs of products are on their outputs."""
    c = FALCON_H1_DEFAULTS | c
    factor = {name: float(c.get(name) or 1.0) for name in FACTORS}
    gate, down = c.get("mlp_multipliers") or (1.0, 1.0)
    into, bias = factor["attention_in_multiplier"], bool(c.get("attention_bias"))
    _check_bias("attention_in_multiplier", into, "attention_bias", bias)
    head_dim = hf_head_dim(c)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=(LayerKind(hf_rope(c, head_dim), mixer="attention_beside_ssd"),) * c["num_hidden_layers"],
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=c.get("mlp_bias"),
            ssd=_ssd(c, factor["ssm_in_multiplier"], factor["ssm_out_multiplier"]),
            embedding_scale=factor["embedding_multiplier"],
            logit_scale=factor["lm_head_multiplier"],
            attention_scale=head_dim**-0.5 * into * into * factor["key_multiplier"],
            attention_out_scale=into * factor["attention_out_multiplier"],
            mlp_gate_scale=float(gate),
            mlp_out_scale=float(down),
        )
    )


def _check_bias(factor: str, value: float, flag: str, bias: bool) -> None:
    """A factor on the input of a product with a bias is not one on its output."""
    if bias and value != 1.0:
        raise CheckpointError(f"{factor} is {value}; accepted is 1 where {flag} is true")


def _ssd(c: dict[str, Any], into: float, out: float) -> SSDConfig:
    check_activation(c, "hidden_act")
    inner = c["mamba_expand"] * c["hidden_size"] if c["mamba_d_ssm"] is None else c["mamba_d_ssm"]
    heads, bias = c["mamba_n_heads"], bool(c.get("mamba_proj_bias"))
    head_dim = inner // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    check_sizes("mamba_d_head", head_dim, heads, inner)
    _check_bias("ssm_in_multiplier", into, "mamba_proj_bias", bias)
    return SSDConfig(
        heads=heads,
        head_dim=head_dim,
        state_size=c.get("mamba_d_state", 256),
        groups=c.get("mamba_n_groups", 1),
        kernel=c.get("mamba_d_conv", 4),
        conv_bias=bool(c.get("mamba_conv_bias", True)),
        bias=bias,
        output_bias=bool(c.get("projectors_bias")),
        norm=_norm_place(c),
        scales=tuple(into * factor for factor in c.get("ssm_multipliers") or (1.0,) * 5),
        out_scale=out,
        **hf_time_step_limits(c),
    )


def _norm_place(c: dict[str, Any]) -> NormPlace | None:
    if not c.get("mamba_rms_norm"):
        return None
    return "before_gate" if c.get("mamba_norm_before_gate", True) else "after_gate"


def falcon_h1_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    layer, mlp = "model.layers.*", "model.layers.*.feed_forward"
    return {
        "norm.weight": "model.final_layernorm.weight",
        "layers.*.mlp_norm.weight": f"{layer}.pre_ff_layernorm.weight",
        **hf_linear("layers.*.mlp.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        **hf_linear("layers.*.mlp.down", f"{mlp}.down_proj"),
        **hf_ssd_names(config, f"{layer}.mamba"),
    }


def falcon_h1_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """llama.cpp calls one norm without saying that it is a weight."""
    norm = AnyOf("blk.*.ffn_norm", "blk.*.ffn_norm.weight")
    return gguf_ssd_names(config) | {"layers.*.mlp_norm.weight": norm}


FALCON_H1_GGUF: Table = {
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": gguf_ssd_head_dim,
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
"""All factors are in the weights of such a file."""


FALCON_H1 = Family(
    name="Falcon-H1",
    models="Falcon-H1 (0.5B to 34B), Falcon-H1R",
    architectures=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    from_hf=falcon_h1_from_hf,
    gguf_architectures=("falcon-h1",),
    gguf=FALCON_H1_GGUF,
    hf_names=falcon_h1_hf_names,
    gguf_names=falcon_h1_gguf_names,
)
