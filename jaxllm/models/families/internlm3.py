"""InternLM 3: Llama with biases by keys of its own."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`qkv_bias` is also on the output of attention, and `bias` on the MLP; both have Llama's names in newer files."""
    attention, mlp = c.get("qkv_bias", c.get("attention_bias")), c.get("bias", c.get("mlp_bias"))
    return DecoderConfig(**hf_fields(DEFAULTS | c, qkv_bias=attention, output_bias=attention, mlp_bias=mlp))


FAMILY = Family(
    name="InternLM 3",
    models="InternLM3-8B",
    architectures=("InternLM3ForCausalLM",),
    model_types=("internlm3",),
    from_hf=from_hf,
)
