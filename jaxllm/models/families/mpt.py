"""MPT: positions by ALiBi alone, norms and products without biases (MosaicML's llm-foundry, 2023)."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile
from jaxllm.models.hf import hf_fields
from jaxllm.models.hf_fields import COUNT, FACTOR, LAYERS, LENGTH, SIZE, maybe
from jaxllm.models.layers.alibi import USUAL_STEEPNESS
from jaxllm.weights.fields import NULL, OBJECT, FieldKind, FieldKinds, check_fields, either, one_of, real, whole
from jaxllm.weights.names import Pattern

OWN_KEYS = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip
"""MPT's names of keys that other families call otherwise."""
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "expansion_ratio": 4, "tie_word_embeddings": True,
}  # fmt: skip
ALWAYS = FieldKind("true", lambda value: value is True)
NEVER = FieldKind("false", lambda value: value is False)
FIELDS: FieldKinds = {
    "d_model": SIZE,
    "n_heads": COUNT,
    "n_layers": LAYERS,
    "max_seq_len": LENGTH,
    "expansion_ratio": whole(1, 2**10),
    "attn_config": maybe(OBJECT),
    "no_bias": ALWAYS,
    "logit_scale": NULL,
    "norm_type": one_of("low_precision_layernorm", "layernorm"),
}
ATTENTION_FIELDS: FieldKinds = {
    "alibi": ALWAYS,
    "alibi_bias_max": FACTOR,
    "softmax_scale": maybe(FACTOR),
    "attn_type": one_of("multihead_attention"),
    "clip_qkv": either(NULL, FACTOR, real(0, 0)),
    "prefix_lm": NEVER,
    "qk_ln": NEVER,
}
"""Of `attn_config`."""
WHAT_MPT_IS: dict[str, Any] = {"norm": "layer_unbiased", "gated_mlp": False, "hidden_act": "gelu"}


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The MLP is `expansion_ratio` times as wide as the model."""
    c = DEFAULTS | c | {usual: c[own] for own, usual in OWN_KEYS.items() if own in c}
    attention = c.get("attn_config") or {}
    check_fields(attention, ATTENTION_FIELDS, "attn_config.")
    return DecoderConfig(
        **hf_fields(
            {"intermediate_size": c["expansion_ratio"] * c["hidden_size"]} | c,
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            alibi=float(attention.get("alibi_bias_max", USUAL_STEEPNESS)),
            attention_scale=attention.get("softmax_scale"),
            qkv_clip=attention.get("clip_qkv") or None,
            **WHAT_MPT_IS,
        )
    )


def _gguf_attention(file: GgufFile) -> dict[str, Any]:
    """Files of models with learnt positions have no, or a flat, ALiBi, and are refused."""
    return {"alibi_bias_max": file("attention.max_alibi_bias"), "clip_qkv": file("attention.clamp_kqv", None)}


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Queries, keys and values of all heads lie one after the other."""
    block = "transformer.blocks.*"
    return {
        "embed.weight": "transformer.wte.weight",
        "norm.weight": "transformer.norm_f.weight",
        "layers.*.attention_norm.weight": f"{block}.norm_1.weight",
        "layers.*.mlp_norm.weight": f"{block}.norm_2.weight",
        "layers.*.attention.qkv.weight": f"{block}.attn.Wqkv.weight",
        "layers.*.attention.output.weight": f"{block}.attn.out_proj.weight",
        "layers.*.mlp.up.weight": f"{block}.ffn.up_proj.weight",
        "layers.*.mlp.down.weight": f"{block}.ffn.down_proj.weight",
    }


FAMILY = Family(
    name="MPT",
    models="MPT-7B, MPT-30B",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    model_types=("mpt",),
    fields=FIELDS,
    from_hf=from_hf,
    hf_names=hf_names,
    gguf_architectures=("mpt",),
    gguf={"attn_config": _gguf_attention},
)
