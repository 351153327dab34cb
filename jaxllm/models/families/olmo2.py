"""OLMo 2: norms on what attention and MLP give, and one over all heads of queries and keys (arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, gguf_rope, gguf_windows
from jaxllm.models.hf import hf_fields, post_norm_names
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.weights.checkpoint import Checkpoint

WHAT_OLMO_IS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "rms_whole"}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    c, bias = {"rms_norm_eps": 1e-5} | c, c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, **WHAT_OLMO_IS))


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """The architecture serves OLMo 3 too: layers with a window have the same base, and no scaling."""
    rope, get = gguf_rope(checkpoint), Metadata(checkpoint)
    local = RopeConfig(dim=rope.dim, theta=float(get("rope.freq_base_swa", rope.theta)))
    layers = tuple(
        LayerKind(rope if window is None else local, window) for window in gguf_windows(checkpoint, period=4)
    )
    return DecoderConfig(**gguf_fields(checkpoint, layers=layers, **WHAT_OLMO_IS))


FAMILY = Family(
    name="OLMo 2",
    models="OLMo 2 1B, 7B, 13B, 32B",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    from_hf=from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("olmo2",),
    from_gguf=from_gguf,
)
