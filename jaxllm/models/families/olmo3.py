"""OLMo 3: OLMo 2 with a window on three layers of four, and YaRN on the others only."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.olmo2 import WHAT_OLMO_IS
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, layer_types
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_windows, post_norm_names
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.weights.fields import shown

THETA = 500_000.0
DEFAULT: dict[str, Any] = {"rope_type": "default"}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rope_scaling` is that of the layers without a window; newer files have an entry for each kind."""
    c = {"rms_norm_eps": 1e-5, "sliding_window": 4096} | c
    ropes, size = c.get("rope_parameters") or {}, hf_head_dim(c)
    if ropes and not set(ropes) & set(LAYER_TYPES):
        raise CheckpointError(f"rope_parameters is {shown(ropes)}; accepted are entries {' and '.join(LAYER_TYPES)}")
    given = ropes.get("full_attention") or c.get("rope_scaling") or DEFAULT
    rope = hf_rope(c, size, theta=THETA, parameters=given)
    local = hf_rope(c, size, theta=THETA, parameters=ropes.get("sliding_attention") or DEFAULT)
    layers = tuple(LayerKind(rope if window is None else local, window) for window in hf_windows(c, period=4))
    bias = c.get("attention_bias", False)
    stated = {"max_position_embeddings": c["max_position_embeddings"]} if "max_position_embeddings" in c else {}
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **WHAT_OLMO_IS, **stated))


GGUF: Table = {
    "sliding_window": "attention.sliding_window",
    "layer_types": layer_types(4),
    "rope_parameters": lambda file: {
        "sliding_attention": {"rope_theta": file("rope.freq_base_swa", file("rope.freq_base", 10_000.0))}
    },
}


FAMILY = Family(
    name="OLMo 3",
    models="OLMo 3 7B, 32B",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    from_hf=from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("olmo2",),
    gguf=GGUF,
    owns=lambda file: file("attention.sliding_window", 0) > 0,
)
