"""BERT, RoBERTa and XLM-RoBERTa: encoders with learnt positions, and norms after the residual sums.

Devlin et al. 2018 (arXiv:1810.04805), Liu et al. 2019 (arXiv:1907.11692), Conneau et al. 2019 (arXiv:1911.02116).
"""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig, LayerKind
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile, Table, rows
from jaxllm.models.gguf_names import ENCODER_NAMES
from jaxllm.models.hf import hf_fields, hf_linear
from jaxllm.models.layers.encoder import EncoderConfig
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern

UNUSED = ("*position_ids", "*token_type_ids", "*pooler.*", "cls.*", "lm_head.*", "*.contact_head.*")
"""Heads of the training, and the pooler of a model that does not classify."""


_ONLY = {"is_decoder": False, "position_embedding_type": "absolute"}
"""What files may say of things that other models of their kind have."""


def bert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """A text's first token has the first position."""
    return _from_hf(c, first_position=0)


def roberta_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Positions begin behind that of padding, and the rows before them are nobody's."""
    pad = c.get("pad_token_id", 1)
    return _from_hf({"type_vocab_size": 2} | c, first_position=0 if pad is None else pad + 1)


def _from_hf(c: dict[str, Any], first_position: int) -> DecoderConfig:
    for key, accepted in _ONLY.items():
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


GGUF: Table = {
    "max_position_embeddings": rows("position_embd.weight"),
    "model_max_length": "context_length",
    "type_vocab_size": gguf_token_types,
}
"""The rows in front of the first position are left out of a file."""


def gguf_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Those of encoders."""
    return ENCODER_NAMES


def _norm(path: str, name: str) -> dict[str, Pattern]:
    """The first checkpoints say gamma and beta."""
    return {
        f"{path}.weight": AnyOf(f"{name}.weight", f"{name}.gamma"),
        f"{path}.bias": AnyOf(f"{name}.bias", f"{name}.beta"),
    }


def hf_names(config: DecoderConfig) -> dict[str, Pattern]:
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
    gguf=GGUF,
    gguf_names=gguf_names,
    hf_names=hf_names,
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
    hf_names=hf_names,
    ignored=UNUSED,
)
