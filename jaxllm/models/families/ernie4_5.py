"""ERNIE 4.5, dense and with experts: Llama whose heads are rotated in neighbouring pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile, Table, optional
from jaxllm.models.hf import hf_expert_names, hf_fields, hf_head_dim, hf_rope
from jaxllm.models.layers.moe import MoEConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern, Source

THETA = 500_000.0
DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131_072}
MOE_DEFAULTS = {
    "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`use_bias` is on every product but the head."""
    c, bias = DEFAULTS | {"head_dim": 128, "num_key_value_heads": 2} | c, c.get("use_bias", False)
    layers = (LayerKind(_rope(c)),) * c["num_hidden_layers"]
    return DecoderConfig(**hf_fields(c, layers=layers, qkv_bias=bias, output_bias=bias, mlp_bias=bias))


def moe_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A bias has a say in who is chosen, and none in the weights.

    `moe_norm_min`, the least that these are divided by, is below any sum of theirs: the chosen are a large part of all.
    """
    c = DEFAULTS | MOE_DEFAULTS | c
    if c.get("use_bias"):
        raise CheckpointError(f"use_bias is {shown(c['use_bias'])}; accepted is false in a model with experts")
    moe = MoEConfig(
        num_experts=c["moe_num_experts"],
        top_k=c["moe_k"],
        hidden=c["moe_intermediate_size"],
        correction_bias=True,
        renormalize=True,
        shared_hidden=c["moe_num_shared_experts"] * c["moe_intermediate_size"],
    )
    number, step = c["num_hidden_layers"], c["moe_layer_interval"]
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    last = number - 1 if last == -1 else last
    rope = _rope(c)
    layers = tuple(LayerKind(rope, sparse=(i + 1) % step == 0 and first <= i <= last) for i in range(number))
    return DecoderConfig(**hf_fields(c, layers=layers, moe=moe))


def _rope(c: dict[str, Any]) -> Any:
    return hf_rope(c, hf_head_dim(c), theta=THETA, interleaved=True)


def moe_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The bias on the choice is a row of a matrix, since one model has text's and images' experts in one tensor."""
    block = "model.layers.*.mlp"
    bias = Source(f"{block}.moe_statics.e_score_correction_bias", _flat)
    return hf_expert_names(config, block) | {"layers.*.mlp.router.correction_bias": bias}


def moe_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The same row in a file."""
    return {"layers.*.mlp.router.correction_bias": Source("blk.*.exp_probs_b.bias", _flat)}


def _flat(bias: np.ndarray) -> np.ndarray:
    return bias.reshape(-1)


def _gguf_shared_experts(file: GgufFile) -> int:
    return file("expert_shared_feed_forward_length", 0) // file("expert_feed_forward_length")


GGUF: Table = {"rope_theta": optional("rope.freq_base", THETA)}
MOE_GGUF: Table = GGUF | {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": _gguf_shared_experts,
    "moe_layer_start_index": optional("leading_dense_block_count", 0),
    "moe_layer_interval": optional("interleave_moe_layer_step", 1),
}


DENSE = Family(
    name="ERNIE 4.5",
    models="ERNIE-4.5-0.3B",
    architectures=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    from_hf=from_hf,
    gguf_architectures=("ernie4_5",),
    gguf=GGUF,
)

MOE = Family(
    name="ERNIE 4.5 MoE",
    models="ERNIE-4.5-21B-A3B, 300B-A47B",
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    from_hf=moe_from_hf,
    hf_names=moe_hf_names,
    gguf_architectures=("ernie4_5-moe",),
    gguf=MOE_GGUF,
    gguf_names=moe_gguf_names,
)
