"""StableLM 3B, StableLM 2 1.6B and 12B: LayerNorm, a quarter of each head rotated (arXiv:2402.17834)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, tensor
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_rope
from jaxllm.weights.names import Pattern, Source


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The 12B model has a norm for every query and key head, and runs attention and MLP side by side.

    A `head_dim` says nothing: StableLM's own code shares the hidden size out among the heads.
    """
    c = {"num_key_value_heads": 32, "max_position_embeddings": 4096} | c | {"head_dim": None}
    rope = hf_rope(c, hf_head_dim(c), partial=0.25)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qkv_bias=c.get("use_qkv_bias", False),
            qk_norm="layer_per_head" if c.get("qk_layernorm") else None,
            parallel_residual=c.get("use_parallel_residual", False),
        )
    )


GGUF: Table = {
    "qk_layernorm": tensor("blk.0.attn_q_norm.weight"),
    "use_parallel_residual": lambda file: not file.has("blk.0.ffn_norm.weight"),
}
"""Attention and MLP are side by side where there is no norm in front of the MLP, whatever the metadata say."""


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Every head's norm is a tensor of its own."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        f"layers.*.attention.{p}_norm.weight": Source(
            f"model.layers.*.self_attn.{p}_layernorm.norms.{{}}.weight", stack=number
        )
        for p, number in heads.items()
    }


FAMILY = Family(
    name="StableLM",
    models="StableLM 3B 4E1T, StableLM 2 1.6B, 12B",
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    from_hf=from_hf,
    gguf_architectures=("stablelm",),
    gguf=GGUF,
    hf_names=hf_names,
)
