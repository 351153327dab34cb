"""Qwen 2, Qwen 2.5 and QwQ: Llama with biases on queries, keys and values (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope

MAX_WINDOW_LAYERS = 28


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """o has no bias."""
    return DecoderConfig(**hf_fields(c, layers=windowed_layers(c), qkv_bias=True))


def windowed_layers(c: dict[str, Any]) -> tuple[LayerKind, ...]:
    """With `use_sliding_window`, layers from `max_window_layers` on slide, or those that `layer_types` says."""
    rope, number = hf_rope(c, hf_head_dim(c)), c["num_hidden_layers"]
    if not c.get("use_sliding_window"):
        return (LayerKind(rope),) * number
    first = c.get("max_window_layers", MAX_WINDOW_LAYERS)
    kinds = c.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(number)]
    window = c.get("sliding_window", 4096)
    return tuple(LayerKind(rope, window if kind == "sliding_attention" else None) for kind in kinds)


FAMILY = Family(
    name="Qwen 2",
    models="Qwen 2, 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    from_hf=from_hf,
    gguf_architectures=("qwen2",),
    gguf={},
)
