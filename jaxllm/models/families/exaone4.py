"""EXAONE 4.0: norms on what attention and MLP give; layers without a window know no positions (arXiv:2507.11407)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, layer_types, nonzero
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_windows, post_norm_names
from jaxllm.models.layers.rope import RopeConfig

WHAT_EXAONE_IS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "rms"}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Without `sliding_window` every layer rotates."""
    c = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096} | c
    layers = _layers(hf_rope(c, hf_head_dim(c)), hf_windows(c, period=4), c["sliding_window"] is not None)
    return DecoderConfig(**hf_fields(c, layers=layers, **WHAT_EXAONE_IS))


GGUF: Table = {"sliding_window": nonzero("attention.sliding_window"), "layer_types": layer_types(4)}


def _layers(rope: RopeConfig, windows: list[int | None], windowed: bool) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(None if windowed and window is None else rope, window) for window in windows)


FAMILY = Family(
    name="EXAONE 4",
    models="EXAONE 4.0 1.2B, 32B",
    architectures=("Exaone4ForCausalLM",),
    model_types=("exaone4",),
    from_hf=from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("exaone4",),
    gguf=GGUF,
)
