"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side, LayerNorm, biases everywhere (arXiv:2309.05463)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import Table, rows
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.weights.names import Pattern

WHAT_PHI_IS: dict[str, Any] = {
    "norm": "layer", "parallel_residual": True, "gated_mlp": False, "qkv_bias": True, "output_bias": True,
    "mlp_bias": True, "head_bias": True,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of each head is rotated unless `partial_rotary_factor` says otherwise."""
    rope = hf_rope(c, hf_head_dim(c), partial=0.5)
    return DecoderConfig(
        **hf_fields(
            {"hidden_act": "gelu_new"} | c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qk_norm="layer" if c.get("qk_layernorm") else None,
            **WHAT_PHI_IS,
        )
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Phi's own names."""
    layer = "model.layers.*"
    return {
        **hf_linear("norm", "model.final_layernorm"),
        **hf_linear("layers.*.attention.output", f"{layer}.self_attn.dense"),
        **hf_linear("layers.*.attention.q_norm", f"{layer}.self_attn.q_layernorm"),
        **hf_linear("layers.*.attention.k_norm", f"{layer}.self_attn.k_layernorm"),
        **hf_linear("layers.*.mlp.up", f"{layer}.mlp.fc1"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.fc2"),
    }


GGUF: Table = {"intermediate_size": rows("blk.0.ffn_up.weight")}
"""A file's `feed_forward_length` is four times the hidden size, whatever the MLP has."""


FAMILY = Family(
    name="Phi",
    models="Phi-1, 1.5, 2",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    from_hf=from_hf,
    gguf_architectures=("phi2",),
    gguf=GGUF,
    hf_names=hf_names,
)
