"""Qwen 3, its embedding and reranking models: a norm on every query and key head (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.families.qwen2 import windowed_layers
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Heads have 128 channels where `head_dim` is absent."""
    c = {"head_dim": 128} | c
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, layers=windowed_layers(c), qk_norm="rms", qkv_bias=bias, output_bias=bias))


FAMILY = Family(
    name="Qwen 3",
    models="Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    model_types=("qwen3",),
    from_hf=from_hf,
    gguf_architectures=("qwen3",),
    gguf={},
)
