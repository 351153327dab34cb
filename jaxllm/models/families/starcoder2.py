"""StarCoder 2: LayerNorm and biases throughout, an MLP without a gate (Lozhkov et al. 2024, arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.weights.names import Pattern

GELU = "gelu_pytorch_tanh"
DEFAULTS = {
    "hidden_act": GELU, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A window, where there is one, is on every layer."""
    bias = c.get("use_bias", True)
    layer = LayerKind(hf_rope(c, hf_head_dim(c)), c.get("sliding_window"))
    return DecoderConfig(
        **hf_fields(
            DEFAULTS | c,
            layers=(layer,) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("norm_epsilon", 1e-5),
            gated_mlp=False,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The MLP's parts have GPT-2's names."""
    return {
        **hf_linear("layers.*.mlp.up", "model.layers.*.mlp.c_fc"),
        **hf_linear("layers.*.mlp.down", "model.layers.*.mlp.c_proj"),
    }


FAMILY = Family(
    name="StarCoder 2",
    models="StarCoder2 3B, 7B, 15B",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("starcoder2",),
    gguf={},
)
