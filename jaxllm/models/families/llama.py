"""Llama 2, 3 and 3.x, SmolLM2, Yi, and others of their shape (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False)))


FAMILY = Family(
    name="Llama",
    models="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, Yi, DeepSeek-R1-Distill-Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    from_hf=from_hf,
    gguf_architectures=("llama",),
    gguf={},
    gguf_names=permuted_names,
)
