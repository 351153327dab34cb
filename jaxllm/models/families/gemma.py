"""Gemma 1, 2 and 3, text (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786).

All multiply norms by `1 + w`, scale the embeddings by the root of their size, and tie the head to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import ClassifierConfig, DecoderConfig, EncoderConfig, LayerKind
from jaxllm.models.family import Family, hf_fields, hf_head_dim, hf_rope, hf_windows
from jaxllm.models.gguf import GgufFile, Table, nonzero, optional
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern, Source, plus_one

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GELU = "gelu_pytorch_tanh"
EMBEDDING = "gemma-embedding"
"""EmbeddingGemma in GGUF."""
CLASSIFIER = ClassifierConfig(pooling="last", activation=None, output_bias=False)
"""A head over an encoder, as over a decoder."""


def gemma1_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """`hidden_act: gelu` always meant the approximation by tanh."""
    bias, act = c.get("attention_bias", False), c.get("hidden_act") or GELU
    act = GELU if act == "gelu" else act
    c = DEFAULTS | {"num_key_value_heads": 16, "max_position_embeddings": 8192} | c | {"hidden_act": act}
    return DecoderConfig(**hf_fields(c, embedding_scale=math.sqrt(c["hidden_size"]), qkv_bias=bias, output_bias=bias))


def gemma2_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Every other layer slides, the first one included; attention logits and output logits are capped."""
    c = DEFAULTS | {"num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 8192} | c
    number = c["num_hidden_layers"]
    kinds = c.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(number)]
    rope = hf_rope(c, hf_head_dim(c))
    layers = tuple(LayerKind(rope, c["sliding_window"] if kind == "sliding_attention" else None) for kind in kinds)
    return DecoderConfig(
        **_later_fields(c, layers),
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
    )


def gemma3_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Five sliding layers to a global one, each kind with a rotary embedding of its own; a norm on queries and keys.

    `max_position_embeddings` is the scaled length already, although the scaling is linear.
    """
    c = DEFAULTS | {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    } | c  # fmt: skip
    if (cap := c.get("attn_logit_softcapping")) is not None:  # transformers and llama.cpp read it and cap nothing
        raise CheckpointError(f"attn_logit_softcapping is {shown(cap)}; accepted is null, since Gemma 3 caps none")
    ropes = c.get("rope_parameters") or {}
    encoder = None
    if c.get("use_bidirectional_attention"):  # EmbeddingGemma, whose window is shared out to both sides
        encoder = EncoderConfig(classifier=CLASSIFIER)
        c = c | {"sliding_window": c["sliding_window"] // 2 + 1 if c["sliding_window"] else None}
    local = {"rope_theta": c.get("rope_local_base_freq", 10_000.0)} | (ropes.get("sliding_attention") or {})
    everywhere = hf_rope(c, hf_head_dim(c), theta=1e6, parameters=ropes.get("full_attention") or c.get("rope_scaling"))
    near = hf_rope(c, hf_head_dim(c), parameters=local)
    layers = tuple(LayerKind(everywhere if window is None else near, window) for window in hf_windows(c, period=6))
    return DecoderConfig(
        **_later_fields(c, layers, max_position_embeddings=c["max_position_embeddings"]),
        qk_norm="rms",
        logit_softcap=c.get("final_logit_softcapping"),
        encoder=encoder,
    )


def _later_fields(c: dict[str, Any], layers: tuple[LayerKind, ...], **differences: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return hf_fields(
        c,
        layers=layers,
        hidden_act=c.get("hidden_activation") or GELU,
        post_norms=True,
        embedding_scale=math.sqrt(c["hidden_size"]),
        attention_scale=c.get("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        **differences,
    )


def gemma1_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Two norms a layer."""
    return _norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")


def later_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Four norms a layer: `post_attention_layernorm` really is behind the attention."""
    return _norms(
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        **{f"attention.{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    )


def _norms(**names: str) -> dict[str, Pattern]:
    layers = {
        f"layers.*.{path}.weight": Source(f"model.layers.*.{name}.weight", plus_one) for path, name in names.items()
    }
    return {"norm.weight": Source("model.norm.weight", plus_one), **layers}


def _gguf_scalar(layers_of_27b: int) -> Callable[[GgufFile], int]:
    """Files do not say the attention scale; only the 27B models' is not one over the root of their head size."""

    def scalar(file: GgufFile) -> int:
        size, heads = file("embedding_length"), file("attention.head_count")
        return size // heads if file.num_layers == layers_of_27b else file.head_dim

    return scalar


GEMMA2_GGUF: Table = {
    "query_pre_attn_scalar": _gguf_scalar(46),
    "sliding_window": optional("attention.sliding_window", 4096),
    "attn_logit_softcapping": optional("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": optional("final_logit_softcapping", 30.0),
}
GEMMA3_GGUF: Table = {
    "query_pre_attn_scalar": _gguf_scalar(62),
    "sliding_window": nonzero("attention.sliding_window"),
    "attn_logit_softcapping": optional("attn_logit_softcapping", None),
    "final_logit_softcapping": optional("final_logit_softcapping", None),
    "rope_theta": optional("rope.freq_base", 1e6),
    "rope_local_base_freq": optional("rope.freq_base_swa", 10_000.0),
    "rope_parameters": lambda file: {"sliding_attention": {"attn_factor": file("rope.scaling.attn_factor", 1.0)}},
    "use_bidirectional_attention": lambda file: file.architecture == EMBEDDING,
}
"""Which layers slide is not stored in either."""


GEMMA1 = Family(
    name="Gemma",
    models="Gemma 2B, 7B",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    from_hf=gemma1_from_hf,
    gguf_architectures=("gemma",),
    gguf={},
    hf_names=gemma1_hf_names,
)

GEMMA2 = Family(
    name="Gemma 2",
    models="Gemma 2 2B, 9B, 27B",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    from_hf=gemma2_from_hf,
    gguf_architectures=("gemma2",),
    gguf=GEMMA2_GGUF,
    hf_names=later_hf_names,
)

GEMMA3 = Family(
    name="Gemma 3",
    models="Gemma 3 270M, 1B, 4B, 12B, 27B (text), EmbeddingGemma",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    model_types=("gemma3_text",),
    wrappers=("gemma3",),
    from_hf=gemma3_from_hf,
    gguf_architectures=("gemma3", EMBEDDING),
    gguf=GEMMA3_GGUF,
    hf_names=later_hf_names,
)
