"""MiniMax M2: a norm over all heads of queries and keys, part of each head rotated, experts chosen by sigmoids."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_EXPERTS, Table, optional
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_rope
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.names import Pattern

THETA = 5_000_000.0
DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608, "num_experts_per_tok": 8,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rotary_dim` is what is rotated of a head. `intermediate_size` is the experts'; there is no dense MLP."""
    c = DEFAULTS | {"num_local_experts": c.get("num_experts", 256)} | c
    head_dim = c["head_dim"]
    rope = hf_rope(c, head_dim, theta=THETA, partial=(c.get("rotary_dim") or head_dim) / head_dim)
    moe = _experts(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"])
    layers = (LayerKind(rope, sparse=True),) * c["num_hidden_layers"]
    return DecoderConfig(**hf_fields(c, layers=layers, qk_norm="rms_whole", moe=moe))


GGUF: Table = GGUF_EXPERTS | {
    "intermediate_size": "expert_feed_forward_length",
    "rope_theta": optional("rope.freq_base", THETA),
}


def _experts(count: int, top_k: int, hidden: int) -> MoEConfig:
    return MoEConfig(
        num_experts=count, top_k=top_k, hidden=hidden, scoring="sigmoid", correction_bias=True, renormalize=True
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Mixtral's, and the bias on the choice beside the router."""
    block = "model.layers.*.block_sparse_moe"
    bias: dict[str, Pattern] = {"layers.*.mlp.router.correction_bias": f"{block}.e_score_correction_bias"}
    return hf_expert_names(config, block, gate="w1", up="w3", down="w2") | bias


FAMILY = Family(
    name="MiniMax M2",
    models="MiniMax-M2, M2.1, M2.5, M2.7",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("minimax-m2",),
    gguf=GGUF,
)
