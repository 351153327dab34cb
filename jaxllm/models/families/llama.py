"""Llama 2, 3 and 3.x, SmolLM2, Yi, and others of their shape (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Metadata, gguf_fields, gguf_rope, permuted_names
from jaxllm.models.hf import hf_fields
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.checkpoint import Checkpoint


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`attention_bias` is on q, k, v and o alike."""
    bias = c.get("attention_bias", False)
    return DecoderConfig(**hf_fields(c, qkv_bias=bias, output_bias=bias, mlp_bias=c.get("mlp_bias", False)))


def from_gguf(checkpoint: Checkpoint) -> DecoderConfig:
    """The architecture serves Mistral and Mixtral too: with experts they are in every layer, and renormalised."""
    get = Metadata(checkpoint)
    experts = get("expert_count", 0)
    moe = (
        MoEConfig(
            num_experts=experts, top_k=get("expert_used_count"), hidden=get("feed_forward_length"), renormalize=True
        )
        if experts
        else None
    )
    layer = LayerKind(gguf_rope(checkpoint), sparse=moe is not None)
    return DecoderConfig(**gguf_fields(checkpoint, layers=(layer,) * get("block_count"), moe=moe))


FAMILY = Family(
    name="Llama",
    models="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, Yi, DeepSeek-R1-Distill-Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    from_hf=from_hf,
    gguf_architectures=("llama",),
    from_gguf=from_gguf,
    gguf_names=permuted_names,
)
