"""GPT-2, GPT-NeoX, BLOOM and MPT: LayerNorm and MLPs without a gate."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_rope, without_groups
from jaxllm.models.gguf import GgufFile, optional
from jaxllm.models.hf_fields import COUNT, FACTOR, LAYERS, LENGTH, OFF, SIZE, maybe
from jaxllm.models.layers.attention import USUAL_STEEPNESS
from jaxllm.models.names import in_layers, linear
from jaxllm.weights.fields import NULL, OBJECT, FieldKind, FieldKinds, check_fields, either, one_of, real, whole
from jaxllm.weights.names import AnyOf, Pattern, Source, Transform, transposed


def usual(c: dict[str, Any], defaults: dict[str, Any], **own: str) -> dict[str, Any]:
    """`c` with the keys that other families call otherwise, each by its name there, and the family's defaults."""
    return {"tie_word_embeddings": True} | defaults | c | {usual: c[key] for usual, key in own.items() if key in c}


GPT2_KEYS = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


# GPT-2: learned positions, LayerNorm and biases throughout, an MLP without a gate (Radford et al. 2019)
def gpt2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`n_inner` is the size of the MLP: four times the model's where it is null."""
    c = usual(without_groups(c), {"max_position_embeddings": 1024}, **GPT2_KEYS)
    if c.get("scale_attn_by_inverse_layer_idx"):
        raise CheckpointError("scale_attn_by_inverse_layer_idx is true; accepted is false")
    return hf_decoder(
        c | {"intermediate_size": c.get("n_inner") or 4 * c["hidden_size"]}, layers=LayerKind(None),
        hidden_act=c.get("activation_function") or "gelu_new", norm_eps=c.get("layer_norm_epsilon", 1e-5),
        attention_scale=None if c.get("scale_attn_weights", True) else 1.0, attention_bias=True, mlp_bias=True,
        norm="layer", gated_mlp=False, learned_positions=True,
    )  # fmt: skip


GPT2_NORMS = {"norm": "ln_f", "layers.*.attention_norm": "h.*.ln_1", "layers.*.mlp_norm": "h.*.ln_2"}
GPT2_PRODUCTS = {
    "layers.*.attention.qkv": "h.*.attn.c_attn", "layers.*.attention.output": "h.*.attn.c_proj",
    "layers.*.mlp.up": "h.*.mlp.c_fc", "layers.*.mlp.down": "h.*.mlp.c_proj",
}  # fmt: skip


def gpt2_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Matrices lie `[in, out]`; the first published files leave out what stands before the first dot."""
    return {
        "embed.weight": _either("wte.weight"),
        "positions": _either("wpe.weight"),
        **{f"{path}.weight": _either(f"{name}.weight") for path, name in GPT2_NORMS.items()},
        **{f"{path}.weight": _either(f"{name}.weight", transposed) for path, name in GPT2_PRODUCTS.items()},
        **{f"{path}.bias": _either(f"{name}.bias") for path, name in (GPT2_NORMS | GPT2_PRODUCTS).items()},
    }


def _either(name: str, transform: Transform | None = None) -> AnyOf:
    return AnyOf(Source(f"transformer.{name}", transform), Source(name, transform))


GPT2 = Family(
    name="GPT-2", models="GPT-2 124M, 355M, 774M, 1.5B, DistilGPT2",
    architectures=("GPT2LMHeadModel",), model_types=("gpt2",), gguf_architectures=("gpt2",),
    from_hf=gpt2_from_hf, hf_names=gpt2_hf_names,
    gguf={"n_inner": "feed_forward_length"}, gguf_names={"positions": "position_embd.weight"},
)  # fmt: skip


# GPT-NeoX and Pythia: attention and MLP beside each other, a quarter of each head rotated (arXiv:2204.06745)
def gpt_neox_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`rotary_pct` and `rotary_emb_base` are older names of two keys."""
    beside = bool(c.get("use_parallel_residual", True))
    theta, partial = c.get("rotary_emb_base") or 10_000.0, c.get("rotary_pct") or 0.25
    c = {"hidden_act": "gelu"} | without_groups(c)
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c, theta=theta, partial=partial)), norm_eps=c.get("layer_norm_eps", 1e-5),
        attention_bias=c.get("attention_bias", True), mlp_bias=True, norm="layer", gated_mlp=False,
        parallel_residual=beside, parallel_norms=beside,
    )  # fmt: skip


def gpt_neox_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        "embed.weight": "gpt_neox.embed_in.weight",
        **linear("norm", "gpt_neox.final_layer_norm"),
        **linear("head", "embed_out"),
        **layer_names(config, "gpt_neox.layers.*", "attention"),
    }


def layer_names(config: DecoderConfig, layer: str, attention: str) -> dict[str, Pattern]:
    names = in_layers(layer, {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.output": f"{attention}.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    })  # fmt: skip
    return names | by_groups(config, f"{layer}.{attention}.query_key_value")


def by_groups(config: DecoderConfig, fused: str) -> dict[str, Pattern]:
    """The queries of a KV head, its key and its value lie one after the other, and then those of the next KV head."""

    def by_part(rows: np.ndarray) -> np.ndarray:
        groups = rows.reshape(config.num_kv_heads, -1, config.head_dim, *rows.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])

    kinds = ("weight", "bias")
    return {f"layers.*.attention.qkv.{kind}": Source(f"{fused}.{kind}", by_part, by_rows=True) for kind in kinds}


GPT_NEOX = Family(
    name="GPT-NeoX", models="Pythia, GPT-NeoX-20B, Dolly 2",
    architectures=("GPTNeoXForCausalLM",), model_types=("gpt_neox",), gguf_architectures=("gptneox",),
    from_hf=gpt_neox_from_hf, hf_names=gpt_neox_hf_names,
    gguf={"use_parallel_residual": optional("use_parallel_residual", True), "rotary_pct": 1.0},
)  # fmt: skip


# BLOOM: positions by ALiBi alone, a norm on the embedding, biases throughout (arXiv:2211.05100)
def bloom_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = usual(
        c, {"max_position_embeddings": 2048},
        hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer",
        max_position_embeddings="seq_length",
    )  # fmt: skip
    return hf_decoder(
        without_groups(c) | {"intermediate_size": 4 * c["hidden_size"]}, layers=LayerKind(None),
        norm_eps=c.get("layer_norm_epsilon", 1e-5), attention_bias=True, mlp_bias=True, norm="layer",
        embedding_norm=True, gated_mlp=False, hidden_act="gelu_new", alibi=USUAL_STEEPNESS,
    )  # fmt: skip


def bloom_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    return {
        "embed.weight": "transformer.word_embeddings.weight",
        **linear("embedding_norm", "transformer.word_embeddings_layernorm"),
        **linear("norm", "transformer.ln_f"),
        **layer_names(config, "transformer.h.*", "self_attention"),
    }


BLOOM = Family(
    name="BLOOM", models="BLOOM 560M to 176B, BLOOMZ",
    architectures=("BloomForCausalLM",), model_types=("bloom",), gguf_architectures=("bloom",),
    fields={"n_embed": SIZE, "seq_length": maybe(LENGTH), "apply_residual_connection_post_layernorm": OFF},
    from_hf=bloom_from_hf, hf_names=bloom_hf_names, gguf_names=linear("embedding_norm", "token_embd_norm"),
)  # fmt: skip


# MPT: positions by ALiBi alone, norms and products without biases (MosaicML's llm-foundry, 2023)
MPT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "expansion_ratio": 4,
}  # fmt: skip
ALWAYS = FieldKind("true", lambda value: value is True)
NEVER = FieldKind("false", lambda value: value is False)
MPT_FIELDS: FieldKinds = {
    "d_model": SIZE, "n_heads": COUNT, "n_layers": LAYERS, "max_seq_len": LENGTH, "expansion_ratio": whole(1, 2**10),
    "attn_config": maybe(OBJECT), "no_bias": ALWAYS, "logit_scale": NULL,
    "norm_type": one_of("low_precision_layernorm", "layernorm"),
}  # fmt: skip
MPT_ATTENTION_FIELDS: FieldKinds = {  # of `attn_config`
    "alibi": ALWAYS, "alibi_bias_max": FACTOR, "softmax_scale": maybe(FACTOR), "prefix_lm": NEVER, "qk_ln": NEVER,
    "attn_type": one_of("multihead_attention"), "clip_qkv": either(NULL, FACTOR, real(0, 0)),
}  # fmt: skip


def mpt_from_hf(c: dict[str, Any]) -> DecoderConfig:
    c = usual(
        c, MPT_DEFAULTS,
        hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )  # fmt: skip
    attention = c.get("attn_config") or {}
    check_fields(attention, MPT_ATTENTION_FIELDS, "attn_config.")
    return hf_decoder(
        without_groups(c) | {"intermediate_size": c["expansion_ratio"] * c["hidden_size"]}, layers=LayerKind(None),
        norm_eps=c.get("layer_norm_epsilon", 1e-5), alibi=float(attention.get("alibi_bias_max", USUAL_STEEPNESS)),
        attention_scale=attention.get("softmax_scale"), qkv_clip=attention.get("clip_qkv") or None,
        norm="layer_unbiased", gated_mlp=False, hidden_act="gelu",
    )  # fmt: skip


def _gguf_attention(file: GgufFile) -> dict[str, Any]:
    """Files of models with learnt positions have no, or a flat, ALiBi, and are refused."""
    return {"alibi_bias_max": file("attention.max_alibi_bias"), "clip_qkv": file("attention.clamp_kqv", None)}


MPT = Family(
    name="MPT", models="MPT-7B, MPT-30B",
    architectures=("MptForCausalLM", "MPTForCausalLM"), model_types=("mpt",), fields=MPT_FIELDS,
    from_hf=mpt_from_hf,
    hf_names={
        "embed.weight": "transformer.wte.weight",
        "norm.weight": "transformer.norm_f.weight",
        **in_layers("transformer.blocks.*", {
            "attention_norm": "norm_1", "mlp_norm": "norm_2", "attention.qkv": "attn.Wqkv",
            "attention.output": "attn.out_proj", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj",
        }),
    },
    gguf_architectures=("mpt",), gguf={
        "attn_config": _gguf_attention,
        "expansion_ratio": lambda file: file("feed_forward_length") // file("embedding_length"),
    },
)  # fmt: skip
