"""Phi-3, 3.5, 4 and 4-mini: Llama with fused projections and LongRoPE (Abdin et al. 2024, arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, nonzero
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope, hf_rope_parameters

ORIGINAL_LENGTH = 4096
LONGROPE_NAMES = ("su", "yarn", "longrope")
"""Early files call LongRoPE "su", and some "yarn"."""


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The original context is a key beside `rope_scaling`, not in it."""
    c = {
        "original_max_position_embeddings": ORIGINAL_LENGTH, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    } | c  # fmt: skip
    given = hf_rope_parameters(c)
    if given.get("rope_type", given.get("type")) in LONGROPE_NAMES and "long_factor" in given:
        given = given | {"rope_type": "longrope"}
    layer = LayerKind(hf_rope(c, hf_head_dim(c), parameters=given), c.get("sliding_window"))
    return DecoderConfig(**hf_fields(c, layers=(layer,) * c["num_hidden_layers"]))


GGUF: Table = {
    "sliding_window": nonzero("attention.sliding_window"),
    "original_max_position_embeddings": lambda file: file(
        "rope.scaling.original_context_length", file("context_length")
    ),
}


FAMILY = Family(
    name="Phi-3",
    models="Phi-3, 3.5, 4, 4-mini",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    from_hf=from_hf,
    gguf_architectures=("phi3",),
    gguf=GGUF,
)
