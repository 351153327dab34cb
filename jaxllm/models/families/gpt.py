"""GPT-2, GPT-NeoX, BLOOM and MPT: LayerNorm and MLPs without a gate."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.gguf import GgufFile, optional
from jaxllm.models.hf_fields import COUNT, FACTOR, LAYERS, LENGTH, OFF, SIZE, maybe
from jaxllm.models.layers.attention import USUAL_STEEPNESS
from jaxllm.weights.fields import NULL, OBJECT, FieldKind, FieldKinds, check_fields, either, one_of, real, whole
from jaxllm.weights.names import AnyOf, Pattern, Source, Transform, transposed

# GPT-2: learned positions, LayerNorm and biases throughout, an MLP without a gate (Radford et al. 2019)

GPT2_OWN_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
"""GPT-2's names of keys that other families call otherwise."""
GPT2_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 1024, "tie_word_embeddings": True}


def gpt2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`n_inner` is the size of the MLP: four times the model's where it is null."""
    c = GPT2_DEFAULTS | c | {usual: c[own] for own, usual in GPT2_OWN_KEYS.items() if own in c}
    if c.get("scale_attn_by_inverse_layer_idx"):
        raise CheckpointError("scale_attn_by_inverse_layer_idx is true; accepted is false")
    return DecoderConfig(
        **hf_fields(
            c | {"intermediate_size": c.get("n_inner") or 4 * c["hidden_size"]},
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            hidden_act=c.get("activation_function") or "gelu_new",
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            attention_scale=None if c.get("scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            norm="layer",
            gated_mlp=False,
            learned_positions=True,
        )
    )


def gpt2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Matrices lie `[in, out]`; the first published files leave out what stands before the first dot."""
    names: dict[str, Pattern] = {
        "embed.weight": _either("wte.weight"),
        "positions": _either("wpe.weight"),
    }
    vectors = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    products = {
        "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = _either(f"ln_f.{kind}")
        names |= {f"layers.*.{path}.{kind}": _either(f"h.*.{name}.{kind}") for path, name in vectors.items()}
    for path, name in products.items():
        names[f"layers.*.{path}.weight"] = _either(f"h.*.{name}.weight", transposed)
        names[f"layers.*.{path}.bias"] = _either(f"h.*.{name}.bias")
    return names


def _either(name: str, transform: Any = None) -> AnyOf:
    return AnyOf(Source(f"transformer.{name}", transform), Source(name, transform))


def gpt2_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The positions stand beside the embedding."""
    return {"positions": "position_embd.weight"}


GPT2 = Family(
    name="GPT-2",
    models="GPT-2 124M, 355M, 774M, 1.5B, DistilGPT2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    from_hf=gpt2_from_hf,
    hf_names=gpt2_hf_names,
    gguf_architectures=("gpt2",),
    gguf={"n_inner": "feed_forward_length"},
    gguf_names=gpt2_gguf_names,
)


# GPT-NeoX and Pythia: attention and MLP beside each other, a quarter of each head rotated (arXiv:2204.06745)


GPT_NEOX_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "max_position_embeddings": 2048}


def gpt_neox_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rotary_pct` and `rotary_emb_base` are older names of two keys."""
    bias, beside = c.get("attention_bias", True), bool(c.get("use_parallel_residual", True))
    theta, partial = c.get("rotary_emb_base") or 10_000.0, c.get("rotary_pct") or 0.25
    c = GPT_NEOX_DEFAULTS | c
    layers = (LayerKind(hf_rope(c, hf_head_dim(c), theta=theta, partial=partial)),) * c["num_hidden_layers"]
    return DecoderConfig(
        **hf_fields(
            c,
            layers=layers,
            norm_eps=c.get("layer_norm_eps", 1e-5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            norm="layer",
            gated_mlp=False,
            parallel_residual=beside,
            parallel_norms=beside,
        )
    )


def gpt_neox_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Queries, keys and values of a head lie one after the other, and then those of the next."""
    layer = "gpt_neox.layers.*"
    by_part = rows_by_part(config.head_dim)
    return {
        "embed.weight": "gpt_neox.embed_in.weight",
        **hf_linear("norm", "gpt_neox.final_layer_norm"),
        **hf_linear("head", "embed_out"),
        **hf_linear("layers.*.attention_norm", f"{layer}.input_layernorm"),
        **hf_linear("layers.*.mlp_norm", f"{layer}.post_attention_layernorm"),
        **{
            f"layers.*.attention.qkv.{kind}": Source(f"{layer}.attention.query_key_value.{kind}", by_part, by_rows=True)
            for kind in ("weight", "bias")
        },
        **hf_linear("layers.*.attention.output", f"{layer}.attention.dense"),
        **hf_linear("layers.*.mlp.up", f"{layer}.mlp.dense_h_to_4h"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.dense_4h_to_h"),
    }


def rows_by_part(head_dim: int) -> Transform:
    """Rows `(head, part, channel)` as `(part, head, channel)`."""

    def transform(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, 3, head_dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    return transform


GPT_NEOX = Family(
    name="GPT-NeoX",
    models="Pythia, GPT-NeoX-20B, Dolly 2",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    from_hf=gpt_neox_from_hf,
    hf_names=gpt_neox_hf_names,
    gguf_architectures=("gptneox",),
    gguf={"use_parallel_residual": optional("use_parallel_residual", True), "rotary_pct": 1.0},
)


# BLOOM: positions by ALiBi alone, a norm on the embedding, biases throughout (arXiv:2211.05100)

BLOOM_OWN_KEYS = {
    "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
}  # fmt: skip
"""BLOOM's names of keys that other families call otherwise."""
BLOOM_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": True}


def bloom_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The MLP is four times as wide as the model."""
    c = BLOOM_DEFAULTS | c | {usual: c[own] for own, usual in BLOOM_OWN_KEYS.items() if own in c}
    return DecoderConfig(
        **hf_fields(
            {"intermediate_size": 4 * c["hidden_size"]} | c,
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            norm_eps=c.get("layer_norm_epsilon", 1e-5),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            norm="layer",
            embedding_norm=True,
            gated_mlp=False,
            hidden_act="gelu_new",
            alibi=USUAL_STEEPNESS,
        )
    )


def bloom_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
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


def bloom_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """The norm stands beside the embedding."""
    return {f"embedding_norm.{kind}": f"token_embd_norm.{kind}" for kind in ("weight", "bias")}


BLOOM = Family(
    name="BLOOM",
    models="BLOOM 560M to 176B, BLOOMZ",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    fields={
        "n_embed": SIZE,
        "seq_length": maybe(LENGTH),
        "apply_residual_connection_post_layernorm": OFF,
    },
    from_hf=bloom_from_hf,
    hf_names=bloom_hf_names,
    gguf_architectures=("bloom",),
    gguf={},
    gguf_names=bloom_gguf_names,
)


# MPT: positions by ALiBi alone, norms and products without biases (MosaicML's llm-foundry, 2023)

MPT_OWN_KEYS = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip
"""MPT's names of keys that other families call otherwise."""
MPT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "expansion_ratio": 4, "tie_word_embeddings": True,
}  # fmt: skip
ALWAYS = FieldKind("true", lambda value: value is True)
NEVER = FieldKind("false", lambda value: value is False)
MPT_FIELDS: FieldKinds = {
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


def mpt_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """The MLP is `expansion_ratio` times as wide as the model."""
    c = MPT_DEFAULTS | c | {usual: c[own] for own, usual in MPT_OWN_KEYS.items() if own in c}
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
            norm="layer_unbiased",
            gated_mlp=False,
            hidden_act="gelu",
        )
    )


def _gguf_attention(file: GgufFile) -> dict[str, Any]:
    """Files of models with learnt positions have no, or a flat, ALiBi, and are refused."""
    return {"alibi_bias_max": file("attention.max_alibi_bias"), "clip_qkv": file("attention.clamp_kqv", None)}


def mpt_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
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


MPT = Family(
    name="MPT",
    models="MPT-7B, MPT-30B",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    model_types=("mpt",),
    fields=MPT_FIELDS,
    from_hf=mpt_from_hf,
    hf_names=mpt_hf_names,
    gguf_architectures=("mpt",),
    gguf={"attn_config": _gguf_attention},
)
