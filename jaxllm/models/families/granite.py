"""Granite 3: Llama with a factor of its own on embeddings, attention, each residual sum and the logits."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, permuted_names
from jaxllm.models.hf import hf_fields
from jaxllm.weights.checkpoint import Checkpoint


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Logits are divided by `logits_scaling`."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **hf_fields(
            c,
            embedding_scale=float(c.get("embedding_multiplier", 1.0)),
            attention_scale=float(c.get("attention_multiplier", 1.0)),
            residual_scale=float(c.get("residual_multiplier", 1.0)),
            logit_scale=1 / c.get("logits_scaling", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=c.get("mlp_bias", False),
        )
    )


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """A factor of 0 is none."""
    get = Metadata(checkpoint)
    return DecoderConfig(
        **gguf_fields(
            checkpoint,
            embedding_scale=float(get("embedding_scale", 0) or 1),
            attention_scale=float(get("attention.scale", 0)) or None,
            residual_scale=float(get("residual_scale", 0) or 1),
            logit_scale=1 / get("logit_scale"),
        )
    )


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
