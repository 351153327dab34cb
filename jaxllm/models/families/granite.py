"""Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, permuted_names
from jaxllm.models.hf import hf_fields
from jaxllm.weights.checkpoint import Checkpoint


def hf_scales(c: dict[str, Any]) -> dict[str, float]:
    """DecoderConfig's factors. Logits are divided by `logits_scaling`."""
    return {
        "embedding_scale": float(c.get("embedding_multiplier", 1.0)),
        "attention_scale": float(c.get("attention_multiplier", 1.0)),
        "residual_scale": float(c.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / c.get("logits_scaling", 1.0),
    }


def gguf_scales(checkpoint: Checkpoint) -> dict[str, float | None]:
    """DecoderConfig's factors. One of 0 is none."""
    get = Metadata(checkpoint)
    return {
        "embedding_scale": float(get("embedding_scale", 0) or 1),
        "attention_scale": float(get("attention.scale", 0)) or None,
        "residual_scale": float(get("residual_scale", 0) or 1),
        "logit_scale": 1 / get("logit_scale"),
    }


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Biases on attention are on all of its products."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False), **hf_scales(c))
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """The keys that all have, and the factors."""
    return DecoderConfig(**gguf_fields(checkpoint, **gguf_scales(checkpoint)))


FAMILY = Family(
    name="Granite 3",
    models="Granite 3.0, 3.1, 3.2, 3.3",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=from_hf,
    gguf_architectures=("granite",),
    from_gguf=from_gguf,
    gguf_names=permuted_names,
)
