"""Phi-3, 3.5, 4 and 4-mini: Llama with fused projections and LongRoPE (Abdin et al. 2024, arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, gguf_rope
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_rope_parameters
from jaxllm.weights.checkpoint import Checkpoint

ORIGINAL_LENGTH = 4096
LONGROPE_NAMES = ("su", "yarn", "longrope")
"""Early files call LongRoPE "su", and some "yarn"."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The original context is a key beside `rope_scaling`, not in it."""
    c = {
        "original_max_position_embeddings": ORIGINAL_LENGTH, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    } | c  # fmt: skip
    given = hf_rope_parameters(c)
    if given.get("rope_type", given.get("type")) in LONGROPE_NAMES:
        given = given | {"rope_type": "longrope"}
    layer = LayerKind(hf_rope(c, hf_head_dim(c), parameters=given), c.get("sliding_window"))
    return DecoderConfig(**hf_fields(c, layers=(layer,) * c["num_hidden_layers"]))


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """A window of 0 is none."""
    get = Metadata(checkpoint)
    layer = LayerKind(gguf_rope(checkpoint), get("attention.sliding_window", 0) or None)
    return DecoderConfig(**gguf_fields(checkpoint, layers=(layer,) * get("block_count")))


FAMILY = Family(
    name="Phi-3",
    models="Phi-3, 3.5, 4, 4-mini",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    from_hf=from_hf,
    gguf_architectures=("phi3",),
    from_gguf=from_gguf,
)
