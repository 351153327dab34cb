"""OLMo 2 and 3 and EXAONE 4: norms on what attention and MLP give."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, layer_types, nonzero
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_windows, post_norm_names
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.weights.fields import shown

# OLMo 2: norms on what attention and MLP give, and one over all heads of queries and keys (arXiv:2501.00656)

WHAT_OLMO_IS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "rms_whole"}


def olmo2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    c, bias = {"rms_norm_eps": 1e-5} | c, c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, **WHAT_OLMO_IS))


OLMO2 = Family(
    name="OLMo 2",
    models="OLMo 2 1B, 7B, 13B, 32B",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    from_hf=olmo2_from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("olmo2",),
    gguf={},
)


# OLMo 3: OLMo 2 with a window on three layers of four, and YaRN on the others only

OLMO3_THETA = 500_000.0
DEFAULT: dict[str, Any] = {"rope_type": "default"}


def olmo3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rope_scaling` is that of the layers without a window; newer files have an entry for each kind."""
    c = {"rms_norm_eps": 1e-5, "sliding_window": 4096} | c
    ropes, size = c.get("rope_parameters") or {}, hf_head_dim(c)
    if ropes and not set(ropes) & set(LAYER_TYPES):
        raise CheckpointError(f"rope_parameters is {shown(ropes)}; accepted are entries {' and '.join(LAYER_TYPES)}")
    given = ropes.get("full_attention") or c.get("rope_scaling") or DEFAULT
    rope = hf_rope(c, size, theta=OLMO3_THETA, parameters=given)
    local = hf_rope(c, size, theta=OLMO3_THETA, parameters=ropes.get("sliding_attention") or DEFAULT)
    layers = tuple(LayerKind(rope if window is None else local, window) for window in hf_windows(c, period=4))
    bias = c.get("attention_bias", False)
    stated = {"max_position_embeddings": c["max_position_embeddings"]} if "max_position_embeddings" in c else {}
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, **WHAT_OLMO_IS, **stated))


OLMO3_GGUF: Table = {
    "sliding_window": "attention.sliding_window",
    "layer_types": layer_types(4),
    "rope_parameters": lambda file: {
        "sliding_attention": {"rope_theta": file("rope.freq_base_swa", file("rope.freq_base", 10_000.0))}
    },
}


OLMO3 = Family(
    name="OLMo 3",
    models="OLMo 3 7B, 32B",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    from_hf=olmo3_from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("olmo2",),
    gguf=OLMO3_GGUF,
    owns=lambda file: file("attention.sliding_window", 0) > 0,
)


# EXAONE 4.0: norms on what attention and MLP give; layers without a window know no positions (arXiv:2507.11407)


def exaone4_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Without `sliding_window` every layer rotates."""
    c = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096} | c
    rope, windowed = hf_rope(c, hf_head_dim(c)), c["sliding_window"] is not None
    layers = tuple(
        LayerKind(None if windowed and window is None else rope, window) for window in hf_windows(c, period=4)
    )
    return DecoderConfig(**hf_fields(c, layers=layers, pre_norms=False, post_norms=True, qk_norm="rms"))


EXAONE4_GGUF: Table = {"sliding_window": nonzero("attention.sliding_window"), "layer_types": layer_types(4)}


EXAONE4 = Family(
    name="EXAONE 4",
    models="EXAONE 4.0 1.2B, 32B",
    architectures=("Exaone4ForCausalLM",),
    model_types=("exaone4",),
    from_hf=exaone4_from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("exaone4",),
    gguf=EXAONE4_GGUF,
)
