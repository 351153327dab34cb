"""Seed-OSS: Llama with biases on queries, keys and values, and heads of a size of their own."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields
from jaxllm.weights.names import Pattern

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The output's bias has a key of its own."""
    return DecoderConfig(
        **hf_fields(
            DEFAULTS | c,
            qkv_bias=c.get("attention_bias", True),
            output_bias=c.get("attention_out_bias", False),
            mlp_bias=c.get("mlp_bias", False),
        )
    )


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norm in front of the MLP is called after what it comes after."""
    return {"layers.*.mlp_norm.weight": "blk.*.post_attention_norm.weight"}


FAMILY = Family(
    name="Seed-OSS",
    models="Seed-OSS-36B",
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    from_hf=from_hf,
    gguf_architectures=("seed_oss",),
    gguf={},
    gguf_names=gguf_names,
)
