"""Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, nonzero
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields


def hf_scales(c: dict[str, Any]) -> dict[str, float]:
    """DecoderConfig's factors. Logits are divided by `logits_scaling`."""
    return {
        "embedding_scale": float(c.get("embedding_multiplier", 1.0)),
        "attention_scale": float(c.get("attention_multiplier", 1.0)),
        "residual_scale": float(c.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / c.get("logits_scaling", 1.0),
    }


GGUF: Table = {
    "embedding_multiplier": nonzero("embedding_scale", 1.0),
    "attention_multiplier": lambda file: file("attention.scale", 0) or file.head_dim**-0.5,
    "residual_multiplier": nonzero("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}
"""A factor of 0 is none."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Biases on attention are on all of its products."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False), **hf_scales(c))
    )


FAMILY = Family(
    name="Granite 3",
    models="Granite 3.0, 3.1, 3.2, 3.3",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=from_hf,
    gguf_architectures=("granite",),
    gguf=GGUF,
    gguf_names=permuted_names,
)
