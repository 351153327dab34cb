"""Encoders: BERT, RoBERTa, NomicBERT and ModernBERT."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import ClassifierConfig, DecoderConfig, EncoderConfig, LayerKind
from jaxllm.models.family import Family, hf_fields, hf_head_dim, hf_linear, hf_rope
from jaxllm.models.gguf import ABSENT, GgufFile, Table, optional, rows
from jaxllm.models.gguf_names import ENCODER_NAMES
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.models.tasks import GGUF_HEAD
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern

# BERT, RoBERTa and XLM-RoBERTa: encoders with learnt positions, and norms after the residual sums

UNUSED = ("*position_ids", "*token_type_ids", "*pooler.*", "cls.*", "lm_head.*", "*.contact_head.*")
"""Heads of the training, and the pooler of a model that does not classify."""


_BERT_ONLY = {"is_decoder": False, "position_embedding_type": "absolute"}
"""What files may say of things that other models of their kind have."""


def bert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A text's first token has the first position."""
    return _from_hf(c, first_position=0)


def roberta_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Positions begin behind that of padding, and the rows before them are nobody's."""
    pad = c.get("pad_token_id", 1)
    return _from_hf({"type_vocab_size": 2} | c, first_position=0 if pad is None else pad + 1)


def _from_hf(c: dict[str, Any], first_position: int) -> DecoderConfig:
    for key, accepted in _BERT_ONLY.items():
        if c.get(key) not in (None, accepted):
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {shown(accepted)}")
    positions = c.get("max_position_embeddings", 512)
    encoder = EncoderConfig(
        positions=positions,
        first_position=first_position,
        token_types=c.get("type_vocab_size", 2),
        embedding_norm=True,
        sum_norms=True,
        last_norm=False,
    )
    return DecoderConfig(
        **hf_fields(
            {"hidden_act": "gelu"} | c,
            layers=(LayerKind(None),) * c["num_hidden_layers"],
            max_position_embeddings=min(positions - first_position, c.get("model_max_length") or positions),
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-12),
            pre_norms=False,
            post_norms=True,
            gated_mlp=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        encoder=encoder,
    )


def gguf_token_types(file: GgufFile) -> int:
    """Kinds of tokens that have an embedding."""
    return file.rows("token_types.weight") if file.has("token_types.weight") else 0


BERT_GGUF: Table = {
    "max_position_embeddings": rows("position_embd.weight"),
    "model_max_length": "context_length",
    "type_vocab_size": gguf_token_types,
}
"""The rows in front of the first position are left out of a file."""


def _norm(path: str, name: str) -> dict[str, Pattern]:
    """The first checkpoints say gamma and beta."""
    return {
        f"{path}.weight": AnyOf(f"{name}.weight", f"{name}.gamma"),
        f"{path}.bias": AnyOf(f"{name}.bias", f"{name}.beta"),
    }


def bert_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """BERT's names, whose classification head is behind a pooler, or RoBERTa's, whose head has one of its own."""
    layer, embeddings = "model.encoder.layer.*", "model.embeddings"
    attention = f"{layer}.attention"
    dense, output = "classifier.dense", "classifier.output"
    return {
        "embed.weight": f"{embeddings}.word_embeddings.weight",
        "places.positions": f"{embeddings}.position_embeddings.weight",
        "places.types": f"{embeddings}.token_type_embeddings.weight",
        **_norm("embedding_norm", f"{embeddings}.LayerNorm"),
        **hf_linear("layers.*.attention.qkv", *(f"{attention}.self.{p}" for p in ("query", "key", "value"))),
        **hf_linear("layers.*.attention.output", f"{attention}.output.dense"),
        **_norm("layers.*.attention_post_norm", f"{attention}.output.LayerNorm"),
        **hf_linear("layers.*.mlp.up", f"{layer}.intermediate.dense"),
        **hf_linear("layers.*.mlp.down", f"{layer}.output.dense"),
        **_norm("layers.*.mlp_post_norm", f"{layer}.output.LayerNorm"),
        **{f"{dense}.{kind}": AnyOf(f"{dense}.{kind}", f"model.pooler.dense.{kind}") for kind in ("weight", "bias")},
        **{
            f"{output}.{kind}": AnyOf(f"classifier.out_proj.{kind}", f"classifier.{kind}")
            for kind in ("weight", "bias")
        },
    }


BERT = Family(
    name="BERT",
    models="BERT, MiniLM, BGE, E5, GTE, MS MARCO cross-encoders",
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    model_types=("bert",),
    from_hf=bert_from_hf,
    gguf_architectures=("bert",),
    gguf=BERT_GGUF,
    gguf_names=lambda config: ENCODER_NAMES,
    hf_names=bert_hf_names,
    ignored=UNUSED,
)

ROBERTA = Family(
    name="RoBERTa",
    models="RoBERTa, XLM-RoBERTa, multilingual E5, BGE-M3 (dense vectors), BGE rerankers",
    architectures=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    ),
    model_types=("roberta", "xlm-roberta"),
    from_hf=roberta_from_hf,
    gguf_architectures=("bert",),
    hf_names=bert_hf_names,
    ignored=UNUSED,
)


# NomicBERT: BERT with rotary positions, a gated MLP and no biases (Nussbaum et al. 2024, arXiv:2402.01613)

_FIRST_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
"""Keys of the first published files, and what transformers calls the same."""
_NOMIC_BERT_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": (None, "swiglu"), "prenorm": (None, False), "parallel_block": (None, False),
    "use_rms_norm": (None, False), "qkv_proj_bias": (None, False), "mlp_fc1_bias": (None, False),
    "mlp_fc2_bias": (None, False), "rotary_emb_fraction": (None, 1, 1.0), "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,), "rotary_scaling_factor": (None,), "num_experts": (None, 0),
}  # fmt: skip
"""What those files may say of things that other models of their kind have."""


def nomic_bert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A layer is BERT's but for its MLP and its positions."""
    for key, accepted in _NOMIC_BERT_ONLY.items():
        if c.get(key) not in accepted:
            raise CheckpointError(f"{key} is {shown(c[key])}; accepted is {shown(accepted[-1])}")
    c = {new: c[old] for old, new in _FIRST_KEYS.items() if old in c} | c
    encoder = EncoderConfig(
        token_types=c.get("type_vocab_size", 2), embedding_norm=True, sum_norms=True, last_norm=False
    )
    rope = hf_rope(c, hf_head_dim(c), theta=1000.0)
    return DecoderConfig(
        **hf_fields(
            c,
            layers=(LayerKind(rope),) * c["num_hidden_layers"],
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-12),
            pre_norms=False,
            post_norms=True,
            tie_word_embeddings=True,
        ),
        encoder=encoder,
    )


def nomic_bert_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """transformers' names, or those of the first published files."""
    layer, first, embeddings = "model.layers.*", "model.encoder.layers.*", "model.embeddings"

    def either(path: str, name: str, older: str) -> dict[str, Pattern]:
        return {f"{path}.{kind}": AnyOf(f"{name}.{kind}", f"{older}.{kind}") for kind in ("weight", "bias")}

    gate_up = f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"
    return {
        "embed.weight": f"{embeddings}.word_embeddings.weight",
        "places.types": f"{embeddings}.token_type_embeddings.weight",
        **either("embedding_norm", f"{embeddings}.LayerNorm", "model.emb_ln"),
        "layers.*.attention.qkv.weight": AnyOf(
            tuple(f"{layer}.self_attn.{p}_proj.weight" for p in "qkv"), f"{first}.attn.Wqkv.weight"
        ),
        **either("layers.*.attention.output", f"{layer}.self_attn.o_proj", f"{first}.attn.out_proj"),
        **either("layers.*.attention_post_norm", f"{layer}.post_attention_layernorm", f"{first}.norm1"),
        "layers.*.mlp.gate_up.weight": AnyOf(gate_up, (f"{first}.mlp.fc12.weight", f"{first}.mlp.fc11.weight")),
        **either("layers.*.mlp.down", f"{layer}.mlp.down_proj", f"{first}.mlp.fc2"),
        **either("layers.*.mlp_post_norm", f"{layer}.post_mlp_layernorm", f"{first}.norm2"),
        **hf_linear("classifier.dense", "model.pooler.dense"),
        **hf_linear("classifier.output", "classifier"),
    }


NOMIC_BERT = Family(
    name="NomicBERT",
    models="nomic-embed-text v1.5",
    architectures=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    model_types=("nomic_bert",),
    from_hf=nomic_bert_from_hf,
    gguf_architectures=("nomic-bert",),
    gguf={"type_vocab_size": gguf_token_types, "rope_theta": optional("rope.freq_base", 1000.0)},
    gguf_names=lambda config: ENCODER_NAMES,
    hf_names=nomic_bert_hf_names,
    ignored=("*pooler.*", "cls.*", "lm_head.*"),
)


# ModernBERT: an encoder with rotary positions, of which every third layer sees all of a text (arXiv:2412.13663)

MODERNBERT_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192, "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128,
    "global_attn_every_n_layers": 3, "classifier_pooling": "cls", "classifier_activation": "gelu",
}  # fmt: skip


def modernbert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of `local_attention` is seen on either side. The two kinds of layers have rotary bases of their own."""
    c = MODERNBERT_DEFAULTS | c
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


MODERNBERT_GGUF: Table = {
    "classifier_pooling": _no_gguf_head,
    "global_attn_every_n_layers": optional("attention.sliding_window_pattern", 3),
    "local_attention": "attention.sliding_window",
    "global_rope_theta": optional("rope.freq_base", 160_000.0),
    "local_rope_theta": optional("rope.freq_base_swa", 10_000.0),
}


def modernbert_gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Those of encoders, and a decoder's norms."""
    own = ("attention_post_norm", "mlp_post_norm")
    return {path: name for path, name in ENCODER_NAMES.items() if not any(norm in path for norm in own)}


def modernbert_hf_names(config: DecoderConfig) -> dict[str, Pattern]:
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


MODERNBERT = Family(
    name="ModernBERT",
    models="ModernBERT base, large; GTE and Nomic embeddings and rerankers made of it",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    model_types=("modernbert",),
    from_hf=modernbert_from_hf,
    gguf_architectures=("modern-bert",),
    gguf=MODERNBERT_GGUF,
    gguf_names=modernbert_gguf_names,
    hf_names=modernbert_hf_names,
    ignored=("head.*", "decoder.*"),
)
