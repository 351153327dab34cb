"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table
from jaxllm.models.gguf_names import permuted_names
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`intermediate_size` is the experts'; there is no dense MLP."""
    c = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072} | c
    layer = LayerKind(hf_rope(c, hf_head_dim(c), theta=1e6), c.get("sliding_window"), sparse=True)
    moe = MoEConfig(
        num_experts=c.get("num_local_experts", 8),
        top_k=c.get("num_experts_per_tok", 2),
        hidden=c["intermediate_size"],
        scoring="softmax",
        renormalize=True,
    )
    return DecoderConfig(**hf_fields(c, layers=(layer,) * c["num_hidden_layers"], moe=moe))


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """w1 is the gate, w3 the other factor, w2 the way down."""
    return hf_expert_names(config, "model.layers.*.block_sparse_moe", gate="w1", up="w3", down="w2")


GGUF: Table = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}


FAMILY = Family(
    name="Mixtral",
    models="Mixtral 8x7B, 8x22B",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    from_hf=from_hf,
    gguf_architectures=("llama",),
    gguf=GGUF,
    gguf_names=permuted_names,
    owns=lambda file: file("expert_count", 0) > 0,
    hf_names=hf_names,
)
