"""Mistral 7B to Mistral Small 3.2 and Ministral 8B: Llama with an optional sliding window (arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The window is on every layer, or on those that `layer_types` says."""
    c = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072} | c
    rope, window = hf_rope(c, hf_head_dim(c)), c["sliding_window"]
    kinds = c.get("layer_types") or ["sliding_attention"] * c["num_hidden_layers"]
    layers = tuple(LayerKind(rope, window if kind == "sliding_attention" else None) for kind in kinds)
    return DecoderConfig(**hf_fields(c, layers=layers))


FAMILY = Family(
    name="Mistral",
    models="Mistral 7B, Nemo, Small 3.x (text), Ministral 8B",
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Mistral3ForConditionalGeneration"),
    model_types=("mistral", "ministral"),
    wrappers=("mistral3",),
    from_hf=from_hf,
    gguf_architectures=("llama", "mistral3"),
)
