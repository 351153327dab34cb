"""Mamba-2: state-space layers alone, without attention or MLPs."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import ABSENT, Table
from jaxllm.models.hf import hf_linear
from jaxllm.models.layers.ssd import SSDConfig
from jaxllm.models.state_space import (
    check_activation,
    check_sizes,
    gguf_ssd_head_dim,
    gguf_ssd_names,
    hf_ssd_names,
    hf_time_step_limits,
)
from jaxllm.weights.names import AnyOf, Pattern

CONTEXT = 2**20
"""Tokens. A state has no longest context; this is what llama.cpp writes into files."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
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
        layers=_layers(c["num_hidden_layers"]),
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        ssd=ssd,
        max_position_embeddings=c.get("max_position_embeddings", CONTEXT),
        **WITHOUT_ATTENTION,
    )


WITHOUT_ATTENTION: dict[str, Any] = {
    "intermediate_size": 0,
    "num_heads": 0,
    "num_kv_heads": 0,
    "head_dim": 0,
}


def _layers(count: int) -> tuple[LayerKind, ...]:
    return (LayerKind(None, mixer="ssd", mlp=False),) * count


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """All names are its own."""
    return {
        "embed.weight": AnyOf("backbone.embeddings.weight", "backbone.embedding.weight"),
        **hf_linear("norm", "backbone.norm_f"),
        "layers.*.attention_norm.weight": "backbone.layers.*.norm.weight",
        **hf_ssd_names(config, "backbone.layers.*.mixer"),
    }


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return gguf_ssd_names(config)


GGUF: Table = {
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


FAMILY = Family(
    name="Mamba-2",
    models="Mamba-2, Codestral Mamba",
    architectures=("Mamba2ForCausalLM",),
    model_types=("mamba2",),
    from_hf=from_hf,
    gguf_architectures=("mamba2",),
    gguf=GGUF,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
