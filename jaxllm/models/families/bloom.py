"""BLOOM: positions by ALiBi alone, a norm on the embedding, biases throughout (arXiv:2211.05100)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.families.gpt_neox import rows_by_part
from jaxllm.models.family import Family
from jaxllm.models.hf import hf_fields, hf_linear
from jaxllm.models.hf_fields import LENGTH, OFF, SIZE, maybe
from jaxllm.models.layers.alibi import USUAL_STEEPNESS
from jaxllm.weights.names import Pattern, Source

OWN_KEYS = {
    "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
}  # fmt: skip
"""BLOOM's names of keys that other families call otherwise."""
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
WHAT_BLOOM_IS: dict[str, Any] = {
    "norm": "layer", "embedding_norm": True, "gated_mlp": False, "hidden_act": "gelu_new", "alibi": USUAL_STEEPNESS,
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The MLP is four times as wide as the model."""
    c = DEFAULTS | c | {usual: c[own] for own, usual in OWN_KEYS.items() if own in c}
    return DecoderConfig(
        **hf_fields(
            {"intermediate_size": 4 * c["hidden_size"]} | c,
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            **WHAT_BLOOM_IS,
        )
    )


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Queries, keys and values of a head lie one after the other, and then those of the next."""
    layer = "transformer.h.*"
    by_part = rows_by_part(config.head_dim)
    fused = f"{layer}.self_attention.query_key_value"
    return {
        "embed.weight": "transformer.word_embeddings.weight",
        **hf_linear("embedding_norm", "transformer.word_embeddings_layernorm"),
        **hf_linear("norm", "transformer.ln_f"),
        **hf_linear("layers.*.attention_norm", f"{layer}.input_layernorm"),
        **hf_linear("layers.*.mlp_norm", f"{layer}.post_attention_layernorm"),
        **{
            f"layers.*.attention.qkv.{kind}": Source(f"{fused}.{kind}", by_part, by_rows=True)
            for kind in ("weight", "bias")
        },
        **hf_linear("layers.*.attention.output", f"{layer}.self_attention.dense"),
        **hf_linear("layers.*.mlp.up", f"{layer}.mlp.dense_h_to_4h"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.dense_4h_to_h"),
    }


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norm stands beside the embedding."""
    return {f"embedding_norm.{kind}": f"token_embd_norm.{kind}" for kind in ("weight", "bias")}


FAMILY = Family(
    name="BLOOM",
    models="BLOOM 560M to 176B, BLOOMZ",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    fields={
        "n_embed": SIZE,
        "seq_length": maybe(LENGTH),
        "apply_residual_connection_post_layernorm": OFF,
    },
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("bloom",),
    gguf={},
    gguf_names=gguf_names,
)
