"""ModernBERT: an encoder with rotary positions, of which every third layer sees all of a text (arXiv:2412.13663)."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import ABSENT, GgufFile, Table, optional
from jaxllm.models.gguf_names import ENCODER_NAMES
from jaxllm.models.hf import hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.models.layers.encoder import ClassifierConfig, EncoderConfig
from jaxllm.models.tasks import GGUF_HEAD
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192, "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128,
    "global_attn_every_n_layers": 3, "classifier_pooling": "cls", "classifier_activation": "gelu",
}  # fmt: skip


def from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of `local_attention` is seen on either side. The two kinds of layers have rotary bases of their own."""
    c = DEFAULTS | c
    if c.get("norm_bias"):
        raise CheckpointError(f"norm_bias is {shown(c['norm_bias'])}; accepted is false")
    number, every = c["num_hidden_layers"], c["global_attn_every_n_layers"]
    kinds = c.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(number)]
    ropes = c.get("rope_parameters") or {}
    if ropes and not set(ropes) & set(LAYER_TYPES):
        raise CheckpointError(f"rope_parameters is {shown(ropes)}; accepted are entries {' and '.join(LAYER_TYPES)}")

    def rope(kind: str, theta: float) -> Any:
        return hf_rope(
            c,
            hf_head_dim(c),
            parameters={"rope_theta": theta} | (c.get("rope_scaling") or {}) | (ropes.get(kind) or {}),
        )

    everywhere = LayerKind(rope("full_attention", c.get("global_rope_theta", 160_000.0)))
    near = rope("sliding_attention", c.get("local_rope_theta") or 10_000.0)
    local = LayerKind(near, c["local_attention"] // 2 + 1)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=tuple(local if kind == "sliding_attention" else everywhere for kind in kinds),
            hidden_act=c["hidden_activation"],
            norm="layer_unbiased",
            norm_eps=c["norm_eps"],
            qkv_bias=c.get("attention_bias"),
            output_bias=c.get("attention_bias"),
            mlp_bias=c.get("mlp_bias"),
            tie_word_embeddings=True,
        ),
        encoder=_encoder(c),
    )


def _encoder(c: dict[str, Any]) -> EncoderConfig:
    classifier = ClassifierConfig(
        pooling=c["classifier_pooling"],
        activation=c["classifier_activation"],
        dense_bias=bool(c.get("classifier_bias")),
        norm=True,
    )
    return EncoderConfig(embedding_norm=True, first_norm=False, classifier=classifier)


def _no_gguf_head(file: GgufFile) -> Any:
    """What a classification head is made of is not stored."""
    if file.has(GGUF_HEAD):
        raise CheckpointError(
            f"tensor {GGUF_HEAD!r} is a classification head, and GGUF files of ModernBERT do not say what it takes "
            "of a text; accepted is the model in Hugging Face's format"
        )
    return ABSENT


GGUF: Table = {
    "classifier_pooling": _no_gguf_head,
    "global_attn_every_n_layers": optional("attention.sliding_window_pattern", 3),
    "local_attention": "attention.sliding_window",
    "global_rope_theta": optional("rope.freq_base", 160_000.0),
    "local_rope_theta": optional("rope.freq_base_swa", 10_000.0),
}


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Those of encoders, and a decoder's norms."""
    own = ("attention_post_norm", "mlp_post_norm")
    return {path: name for path, name in ENCODER_NAMES.items() if not any(norm in path for norm in own)}


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Names of its own throughout."""
    layer = "model.layers.*"
    return {
        "embed.weight": "model.embeddings.tok_embeddings.weight",
        "embedding_norm.weight": "model.embeddings.norm.weight",
        "layers.*.attention_norm.weight": f"{layer}.attn_norm.weight",
        **hf_linear("layers.*.attention.qkv", f"{layer}.attn.Wqkv"),
        **hf_linear("layers.*.attention.output", f"{layer}.attn.Wo"),
        "layers.*.mlp_norm.weight": f"{layer}.mlp_norm.weight",
        **hf_linear("layers.*.mlp.gate_up", f"{layer}.mlp.Wi"),
        **hf_linear("layers.*.mlp.down", f"{layer}.mlp.Wo"),
        "norm.weight": "model.final_norm.weight",
        **hf_linear("classifier.dense", "head.dense"),
        "classifier.norm.weight": "head.norm.weight",
        **hf_linear("classifier.output", "classifier"),
    }


FAMILY = Family(
    name="ModernBERT",
    models="ModernBERT base, large; GTE and Nomic embeddings and rerankers made of it",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    model_types=("modernbert",),
    from_hf=from_hf,
    gguf_architectures=("modern-bert",),
    gguf=GGUF,
    gguf_names=gguf_names,
    hf_names=hf_names,
    ignored=("head.*", "decoder.*"),
)
