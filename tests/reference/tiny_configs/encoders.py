"""BERT, RoBERTa, XLM-RoBERTa, ModernBERT, NomicBERT, EmbeddingGemma, and classifiers of them."""

from __future__ import annotations

from tests.reference.tiny_configs.gemma import VARIANTS as GEMMA
from tests.reference.tiny_configs.variant import Variant

_BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 151, "hidden_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 6, "intermediate_size": 100, "hidden_act": "gelu", "max_position_embeddings": 96,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
_MODERNBERT = {
    "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 149, "hidden_size": 60,
    "num_hidden_layers": 5, "num_attention_heads": 6, "intermediate_size": 84, "max_position_embeddings": 256,
    "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 14, "global_attn_every_n_layers": 3,
    "global_rope_theta": 5000.0, "local_rope_theta": 70.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 139, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 88, "hidden_act": "silu",
    "max_position_embeddings": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
}  # fmt: skip

VARIANTS: dict[str, Variant] = {
    "bert": Variant("positions and token types that are learnt; norms after the sums; biases throughout", _BERT),
    "bert_classifier": Variant(
        "three classes behind a pooler, of a pair of texts",
        _BERT
        | {
            "architectures": ["BertForSequenceClassification"],
            "id2label": {"0": "glad", "1": "sad", "2": "angry"},
            "label2id": {"glad": 0, "sad": 1, "angry": 2},
        },
    ),
    "xlm_roberta": Variant(
        "positions that begin behind padding's; one type of tokens",
        _BERT
        | {
            "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 2,
            "layer_norm_eps": 1e-5,
        },
        unlike=({"pad_token_id": 0},),
    ),
    "roberta_classifier": Variant(
        "one class, whose head has a product of its own",
        _BERT
        | {
            "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "type_vocab_size": 1,
            "pad_token_id": 2, "layer_norm_eps": 1e-5, "id2label": {"0": "relevant"}, "label2id": {"relevant": 0},
        },
    ),
    "modernbert": Variant(
        "windows to both sides on two of three layers, two rotary bases, no norm in front of the first attention",
        _MODERNBERT,
        unlike=({"local_attention": 16}, {"global_rope_theta": 70.0}, {"local_rope_theta": 5000.0}),
    ),
    "modernbert_classifier": Variant(
        "one class of the mean of all hidden states, behind a product and a norm",
        _MODERNBERT
        | {
            "architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean",
            "classifier_bias": True, "id2label": {"0": "relevant"}, "label2id": {"relevant": 0},
        },
        unlike=({"classifier_pooling": "cls"},),
    ),
    "nomic_bert": Variant(
        "rotary positions and a gated MLP in BERT's layers; q, k and v are one tensor",
        _NOMIC,
        unlike=({"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},),
    ),
    "embedding_gemma": Variant(
        "Gemma 3 whose tokens see those behind them, and whose window is shared out to both sides",
        GEMMA["gemma3_linear_rope"].config
        | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 14},
        unlike=({"use_bidirectional_attention": False}, {"sliding_window": 16}),
    ),
}  # fmt: skip

SECOND_TEXT = 23
"""Where the second text of each prompt begins, for models that tell token types apart."""
