"""OLMo 2: norms on what attention and MLP give, and one over all heads of queries and keys (arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, post_norm_names

WHAT_OLMO_IS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "rms_whole"}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    c, bias = {"rms_norm_eps": 1e-5} | c, c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, **WHAT_OLMO_IS))


FAMILY = Family(
    name="OLMo 2",
    models="OLMo 2 1B, 7B, 13B, 32B",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    from_hf=from_hf,
    hf_names=post_norm_names,
    gguf_architectures=("olmo2",),
    gguf={},
)
