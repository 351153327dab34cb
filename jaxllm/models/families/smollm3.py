"""SmolLM3: Llama with layers that have no positions (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope

NOPE_INTERVAL = 4


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`no_rope_layers` has a 1 for each layer that does rotate."""
    number, bias = c["num_hidden_layers"], c.get("attention_bias", False)
    interval = c.get("no_rope_layer_interval") or NOPE_INTERVAL
    rotating = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    kinds = c.get("layer_types") or ["full_attention" if r else "sliding_attention" for r in rotating]
    rope = hf_rope(c, hf_head_dim(c), theta=2e6)
    return DecoderConfig(
        **hf_fields(
            {"num_key_value_heads": 4, "tie_word_embeddings": True} | c,
            layers=tuple(
                LayerKind(rope if rotates else None, window if kind == "sliding_attention" else None)
                for rotates, kind in zip(rotating, kinds, strict=True)
            ),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=c.get("mlp_bias", False),
        )
    )


FAMILY = Family(
    name="SmolLM3",
    models="SmolLM3-3B",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    from_hf=from_hf,
    gguf_architectures=("smollm3",),
    gguf={},
    gguf_names=permuted_names,
)
