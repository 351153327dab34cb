"""Hunyuan dense: Llama with norms on queries and keys after their rotation, whose base a file may stretch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import gguf_fields
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope, hf_rope_parameters
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import Pattern

WHAT_HUNYUAN_IS: dict[str, Any] = {"qk_norm": "rms", "qk_norm_rotated": True}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    c = {"rms_norm_eps": 1e-5} | c
    bias, layer = c.get("attention_bias", False), LayerKind(_rope(c))
    layers = (layer,) * c["num_hidden_layers"]
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **WHAT_HUNYUAN_IS))


def _rope(c: dict[str, Any]) -> RopeConfig:
    """Dynamic scaling with an `alpha` has the base of a sequence of some length, whatever its length is."""
    given, dim = hf_rope_parameters(c), hf_head_dim(c)
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return hf_rope(c, dim)
    rope = hf_rope(c, dim, parameters=given | {"rope_type": "default"})
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)))


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """The base is stored stretched."""
    return DecoderConfig(**gguf_fields(checkpoint, **WHAT_HUNYUAN_IS))


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Norms are called after what they are of."""
    attention = "model.layers.*.self_attn"
    return {
        **hf_linear("layers.*.attention.q_norm", f"{attention}.query_layernorm"),
        **hf_linear("layers.*.attention.k_norm", f"{attention}.key_layernorm"),
    }


FAMILY = Family(
    name="Hunyuan",
    models="Hunyuan 0.5B, 1.8B, 4B, 7B",
    architectures=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("hunyuan-dense",),
    from_gguf=from_gguf,
)
