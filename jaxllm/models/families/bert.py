"""Encoders: BERT, RoBERTa, NomicBERT and ModernBERT."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.models.config import ClassifierConfig, DecoderConfig, EncoderConfig, LayerKind
from jaxllm.models.family import Family, hf_decoder, hf_rope, without_groups
from jaxllm.models.gguf import ABSENT, GgufFile, optional, rows
from jaxllm.models.hf_fields import LAYER_TYPES, check_only
from jaxllm.models.names import ENCODER_NAMES, in_layers, linear
from jaxllm.models.tasks import GGUF_HEAD
from jaxllm.weights.fields import shown
from jaxllm.weights.names import AnyOf, Pattern

BERT_LAYERS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "tie_word_embeddings": True, "norm": "layer"}
"""Norms come after the residual sums."""
UNUSED = ("*position_ids", "*token_type_ids", "*pooler.*", "cls.*", "lm_head.*", "*.contact_head.*")
"""Heads of the training, and the pooler of a model that does not classify."""


def _either(path: str, first: str, second: str, kinds: tuple[str, str] = ("weight", "bias")) -> dict[str, Pattern]:
    """Weight and bias of `first`, or what `second` has, whose `kinds` are their names there."""
    pairs = zip(("weight", "bias"), kinds, strict=True)
    return {f"{path}.{kind}": AnyOf(f"{first}.{kind}", f"{second}.{other}") for kind, other in pairs}


# BERT, RoBERTa and XLM-RoBERTa: encoders with learnt positions, and norms after the residual sums
def roberta_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Positions begin after that of padding; the rows before them are unused."""
    pad = c.get("pad_token_id", 1)
    return bert_from_hf({"type_vocab_size": 2} | c, first_position=0 if pad is None else pad + 1)


def bert_from_hf(c: dict[str, Any], first_position: int = 0) -> DecoderConfig:
    """The first token of a text has the `first_position`."""
    check_only(c, {"is_decoder": (None, False), "position_embedding_type": (None, "absolute")})
    positions = c.get("max_position_embeddings", 512)
    encoder = EncoderConfig(
        positions=positions, first_position=first_position, token_types=c.get("type_vocab_size", 2),
        embedding_norm=True, sum_norms=True, last_norm=False,
    )  # fmt: skip
    return hf_decoder(
        {"hidden_act": "gelu"} | without_groups(c), layers=LayerKind(None),
        max_position_embeddings=min(positions - first_position, c.get("model_max_length") or positions),
        norm_eps=c.get("layer_norm_eps", 1e-12), gated_mlp=False, attention_bias=True, mlp_bias=True, encoder=encoder,
        **BERT_LAYERS,
    )  # fmt: skip


def gguf_token_types(file: GgufFile) -> int:
    return file.rows("token_types.weight") if file.has("token_types.weight") else 0


def _bert_norm(path: str, name: str) -> dict[str, Pattern]:
    return _either(path, name, name, ("gamma", "beta"))  # as the first checkpoints call them


BERT_NAMES: dict[str, Pattern] = {  # BERT's head follows a pooler, RoBERTa's has one of its own
    "embed.weight": "model.embeddings.word_embeddings.weight",
    "places.positions": "model.embeddings.position_embeddings.weight",
    "places.types": "model.embeddings.token_type_embeddings.weight",
    **_bert_norm("embedding_norm", "model.embeddings.LayerNorm"),
    **in_layers("model.encoder.layer.*", {
        "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
    }),
    **_bert_norm("layers.*.attention_post_norm", "model.encoder.layer.*.attention.output.LayerNorm"),
    **_bert_norm("layers.*.mlp_post_norm", "model.encoder.layer.*.output.LayerNorm"),
    **_either("classifier.dense", "classifier.dense", "model.pooler.dense"),
    **_either("classifier.output", "classifier.out_proj", "classifier"),
}  # fmt: skip

BERT = Family(
    name="BERT", models="BERT, MiniLM, BGE, E5, GTE, MS MARCO cross-encoders",
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), model_types=("bert",),
    from_hf=bert_from_hf, hf_names=BERT_NAMES, ignored=UNUSED, gguf_architectures=("bert",), gguf_names=ENCODER_NAMES,
    gguf={  # The rows before the first position are left out of a file.
        "max_position_embeddings": rows("position_embd.weight"), "model_max_length": "context_length",
        "type_vocab_size": gguf_token_types,
    },
)  # fmt: skip

ROBERTA = Family(
    name="RoBERTa", models="RoBERTa, XLM-RoBERTa, multilingual E5, BGE-M3 (dense vectors), BGE rerankers",
    architectures=(
        "RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification", "XLMRobertaModel",
        "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification",
    ),
    model_types=("roberta", "xlm-roberta"),
    from_hf=roberta_from_hf, hf_names=BERT_NAMES, ignored=UNUSED, gguf_architectures=("bert",), gguf=None,
)  # fmt: skip


# NomicBERT: BERT with rotary positions, a gated MLP and no biases (Nussbaum et al. 2024, arXiv:2402.01613)
_FIRST_KEYS = {  # keys of the first published files, and what transformers calls the same
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
_NOMIC_BERT_ONLY: dict[str, tuple[Any, ...]] = {  # values that those files may have for keys of similar models
    "activation_function": (None, "swiglu"), "prenorm": (None, False), "parallel_block": (None, False),
    "use_rms_norm": (None, False), "qkv_proj_bias": (None, False), "mlp_fc1_bias": (None, False),
    "mlp_fc2_bias": (None, False), "rotary_emb_fraction": (None, 1, 1.0), "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,), "rotary_scaling_factor": (None,), "num_experts": (None, 0),
}  # fmt: skip


def nomic_bert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    check_only(c, _NOMIC_BERT_ONLY)
    c = {new: c[old] for old, new in _FIRST_KEYS.items() if old in c} | without_groups(c)
    token_types = c.get("type_vocab_size", 2)
    return hf_decoder(
        c, layers=LayerKind(hf_rope(c, theta=1000.0)), norm_eps=c.get("layer_norm_eps", 1e-12),
        encoder=EncoderConfig(token_types=token_types, embedding_norm=True, sum_norms=True, last_norm=False),
        **BERT_LAYERS,
    )  # fmt: skip


_NOMIC, _FIRST = "model.layers.*", "model.encoder.layers.*"
_GATE_UP = (f"{_NOMIC}.mlp.gate_proj.weight", f"{_NOMIC}.mlp.up_proj.weight")
NOMIC_BERT_NAMES: dict[str, Pattern] = {  # transformers' names, or those of the first published files
    "embed.weight": "model.embeddings.word_embeddings.weight",
    "places.types": "model.embeddings.token_type_embeddings.weight",
    **_either("embedding_norm", "model.embeddings.LayerNorm", "model.emb_ln"),
    "layers.*.attention.qkv.weight": AnyOf(
        tuple(f"{_NOMIC}.self_attn.{p}_proj.weight" for p in "qkv"), f"{_FIRST}.attn.Wqkv.weight"
    ),
    **_either("layers.*.attention.output", f"{_NOMIC}.self_attn.o_proj", f"{_FIRST}.attn.out_proj"),
    **_either("layers.*.attention_post_norm", f"{_NOMIC}.post_attention_layernorm", f"{_FIRST}.norm1"),
    "layers.*.mlp.gate_up.weight": AnyOf(_GATE_UP, (f"{_FIRST}.mlp.fc12.weight", f"{_FIRST}.mlp.fc11.weight")),
    **_either("layers.*.mlp.down", f"{_NOMIC}.mlp.down_proj", f"{_FIRST}.mlp.fc2"),
    **_either("layers.*.mlp_post_norm", f"{_NOMIC}.post_mlp_layernorm", f"{_FIRST}.norm2"),
    **linear("classifier.dense", "model.pooler.dense"),
    **linear("classifier.output", "classifier"),
}

NOMIC_BERT = Family(
    name="NomicBERT", models="nomic-embed-text v1.5",
    architectures=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    model_types=("nomic_bert",), ignored=("*pooler.*", "cls.*", "lm_head.*"),
    from_hf=nomic_bert_from_hf, hf_names=NOMIC_BERT_NAMES, gguf_architectures=("nomic-bert",), gguf_names=ENCODER_NAMES,
    gguf={"type_vocab_size": gguf_token_types, "rope_theta": optional("rope.freq_base", 1000.0)},
)  # fmt: skip


# ModernBERT: an encoder with rotary positions, of which every third layer sees all of a text (arXiv:2412.13663)
def modernbert_from_hf(c: dict[str, Any]) -> DecoderConfig:
    """Half of `local_attention` is seen on either side. The two kinds of layers have rotary bases of their own."""
    defaults: dict[str, Any] = {
        "max_position_embeddings": 8192, "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128,
        "global_attn_every_n_layers": 3, "classifier_pooling": "cls", "classifier_activation": "gelu",
    }  # fmt: skip
    c = defaults | without_groups(c)
    if c.get("norm_bias"):
        raise CheckpointError(f"norm_bias is {shown(c['norm_bias'])}; accepted is false")
    number, every = c["num_hidden_layers"], c["global_attn_every_n_layers"]
    kinds = c.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(number)]
    ropes = c.get("rope_parameters") or {}
    if ropes and not set(ropes) & set(LAYER_TYPES):
        raise CheckpointError(f"rope_parameters is {shown(ropes)}; accepted are entries {' and '.join(LAYER_TYPES)}")

    def rope(kind: str, theta: float) -> Any:
        return hf_rope(c, parameters={"rope_theta": theta} | (c.get("rope_scaling") or {}) | (ropes.get(kind) or {}))

    everywhere = LayerKind(rope("full_attention", c.get("global_rope_theta", 160_000.0)))
    near = rope("sliding_attention", c.get("local_rope_theta") or 10_000.0)
    local = LayerKind(near, c["local_attention"] // 2 + 1)
    classifier = ClassifierConfig(
        pooling=c["classifier_pooling"], activation=c["classifier_activation"],
        dense_bias=bool(c.get("classifier_bias")), norm=True,
    )  # fmt: skip
    return hf_decoder(
        c, layers=[local if kind == "sliding_attention" else everywhere for kind in kinds],
        hidden_act=c["hidden_activation"], norm="layer_unbiased", norm_eps=c["norm_eps"],
        attention_bias=c.get("attention_bias"), mlp_bias=c.get("mlp_bias"), tie_word_embeddings=True,
        encoder=EncoderConfig(embedding_norm=True, first_norm=False, classifier=classifier),
    )  # fmt: skip


def _no_gguf_head(file: GgufFile) -> Any:
    if file.has(GGUF_HEAD):
        raise CheckpointError(
            f"tensor {GGUF_HEAD!r} is a classification head, and GGUF files of ModernBERT do not say what it takes "
            "of a text; accepted is the model in Hugging Face's format"
        )
    return ABSENT


MODERNBERT = Family(
    name="ModernBERT", models="ModernBERT base, large; GTE and Nomic embeddings and rerankers made of it",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    model_types=("modernbert",), ignored=("head.*", "decoder.*"),
    from_hf=modernbert_from_hf,
    hf_names={
        "embed.weight": "model.embeddings.tok_embeddings.weight",
        "embedding_norm.weight": "model.embeddings.norm.weight",
        "norm.weight": "model.final_norm.weight",
        **in_layers("model.layers.*", {
            "attention_norm": "attn_norm", "attention.qkv": "attn.Wqkv", "attention.output": "attn.Wo",
            "mlp_norm": "mlp_norm", "mlp.gate_up": "mlp.Wi", "mlp.down": "mlp.Wo",
        }),
        **linear("classifier.dense", "head.dense"),
        "classifier.norm.weight": "head.norm.weight",
        **linear("classifier.output", "classifier"),
    },
    gguf_architectures=("modern-bert",),
    gguf={
        "classifier_pooling": _no_gguf_head,
        "global_attn_every_n_layers": optional("attention.sliding_window_pattern", 3),
        "local_attention": "attention.sliding_window",
        "global_rope_theta": optional("rope.freq_base", 160_000.0),
        "local_rope_theta": optional("rope.freq_base_swa", 10_000.0),
    },
    # Its layers have a decoder's norms.
    gguf_names={path: name for path, name in ENCODER_NAMES.items() if "_post_norm" not in path},
)  # fmt: skip
