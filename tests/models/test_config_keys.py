"""Keys that transformers' configurations know: each changes what we read, is refused, or changes no logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.registry import FAMILIES, model_spec
from jaxllm.weights import open_checkpoint
from tests.reference.tiny import tiny_config
from tests.reference.tiny_configs import ENCODERS, VARIANTS, VISION

pytest.importorskip("transformers")

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

HARMLESS = {
    "activation_dropout": "in training only",
    "dropout": "in training only",
    "embed_dropout": "in training only",
    "resid_dropout": "in training only",
    "layerdrop": "in training only",
    "init_std": "of weights that are not loaded",
    "embedding_initializer_range": "of weights that are not loaded",
    "n_ctx": "no model reads it",
    "attention_softmax_in_fp32": "how it is computed",
    "scale_attention_softmax_in_fp32": "how it is computed",
    "enable_moe_fp32_combine": "how it is computed",
    "attention_dropout": "in training only",
    "embd_pdrop": "in training only",
    "hidden_dropout": "in training only",
    "resid_pdrop": "in training only",
    "residual_dropout": "in training only",
    "embedding_dropout": "in training only",
    "hidden_dropout_prob": "in training only",
    "attention_probs_dropout_prob": "in training only",
    "classifier_dropout": "in training only",
    "mlp_dropout": "in training only",
    "initializer_cutoff_factor": "of weights that are not loaded",
    "decoder_bias": "of a head over words, which encoders are not served with",
    "sparse_prediction": "of a head over words, which encoders are not served with",
    "sparse_pred_ignore_index": "of a loss",
    "deterministic_flash_attn": "how it is computed",
    "cls_token_id": "the tokenizer says what a text begins with",
    "sep_token_id": "the tokenizer says what a text ends with",
    "initializer_range": "of weights that are not loaded",
    "router_aux_loss_coef": "of a loss",
    "router_jitter_noise": "in training only",
    "output_router_logits": "what is returned beside the logits",
    "use_cache": "how it is computed",
    "pretraining_tp": "how it is computed",
    "bos_token_id": "the tokenizer says what a prompt begins with",
    "pad_token_id": "prompts are not padded",
    "eod_token_id": "when to stop, which the tokenizer reads",
    "moe_norm_min": "less than any sum of the scores that it is the least of; larger ones are refused",
    "eos_token_id": "when to stop, which the tokenizer reads",
    "num_logits_to_keep": "how it is computed",
    "use_mamba_kernels": "how it is computed",
    "mamba_ssm_cache_dtype": "how it is computed",
    "moe_shared_expert_overlap": "how it is computed",
    "mtp_layers_block_type": "layers past the last, whose tensors are left out",
    "chunk_size": "how it is computed",
    "mamba_chunk_size": "how it is computed",
    "residual_in_fp32": "how it is computed",
    "rescale_prenorm_residual": "of weights that are not loaded",
    "time_step_rank": "of weights that are not loaded",
    "time_step_min": "of weights that are not loaded",
    "time_step_max": "of weights that are not loaded",
    "time_step_floor": "of weights that are not loaded",
    "attn_pdrop": "in training only",
    "reorder_and_upcast_attn": "how it is computed",
    "slow_but_exact": "how it is computed",
    "emb_pdrop": "in training only",
    "embedding_fraction": "in training only",
    "init_device": "of weights that are not loaded",
    "learned_pos_emb": "none are learnt beside biases by distance",
    "summary_type": "of a head for classes",
    "summary_use_proj": "of a head for classes",
    "summary_activation": "of a head for classes",
    "summary_proj_to_labels": "of a head for classes",
    "summary_first_dropout": "of a head for classes",
    "is_decoder": "the class for language models always is one",
    "num_nextn_predict_layers": "layers past the last, whose tensors are left out, or draft",
    "num_mtp_layers": "layers past the last, whose tensors are left out",
}
"""Keys that change no logits, each with its reason."""

ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert")

WITHOUT_MEANING = {
    ("qwen3_vl_moe_text", "tie_word_embeddings"): "its wrapper says it",
    **{(kind, "tie_word_embeddings"): "encoders are served without a head over words" for kind in ENCODER_TYPES},
    ("ministral3", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v2", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v3", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("mistral4", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("gpt_oss", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v2", "head_dim"): "transformers replaces it by qk_rope_head_dim",
    ("deepseek_v3", "head_dim"): "transformers replaces it by qk_rope_head_dim",
    ("nemotron_h", "expand"): "the size is that of all heads",
    ("nemotron_h", "mamba_proj_bias"): "transformers looks at use_bias",
    ("nemotron_h", "n_shared_experts"): "moe_shared_expert_intermediate_size is that of all together",
    ("gemma4_unified_text", "use_double_wide_mlp"): "it is of layers that share keys and values, of which it has none",
    ("biogpt", "layer_norm_eps"): "transformers' norms have 1e-5",
    **{("falcon", key): "of models before the new architecture" for key in ("multi_query", "parallel_attn")},
    ("minicpm3", "head_dim"): "transformers replaces it by qk_rope_head_dim",
    ("stablelm", "head_dim"): "transformers shares the hidden size out among the heads",
}
"""Keys that a family's own other keys decide, each with its reason."""

MODELS = {"phi3": "phi3_longrope_long", "deepseek_v2": "deepseek_v2", "granitemoehybrid": "granite4_moe",
          "falcon_h1": "falcon_h1_norm", "nemotron_h": "nemotron_h_moe",
          "falcon": "falcon_new"}  # fmt: skip
"""Tiny models in which all keys have a meaning, where the first of its type has some without."""

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
"""What gives the other keys of windows a meaning in the families that have the first."""

OTHERS: dict[str, list[Any]] = {
    "activation": ["relu"],
    "attention_types": [[[["global"], 4]]],
    "layer_rope_theta": [[10.0] * 3],
    "activation_function": ["relu", "gelu"],
    "attn_logit_softcapping": [3.0],
    "classifier_activation": ["relu", "tanh"],
    "classifier_pooling": ["mean", "cls"],
    "local_attention": [20],
    "decoder_sparse_step": [2],
    "final_logit_softcapping": [3.0],
    "first_k_dense_replace": [2],
    "full_attn_idxs": [[1]],
    "head_dim": [16, 24, 12],
    "hidden_act": ["relu", "gelu_new"],
    "hidden_activation": ["relu", "gelu_new"],
    "intermediate_size": [200],
    "max_window_layers": [0],
    "mlp_only_layers": [[0]],
    "no_rope_layer_interval": [2],
    "num_experts_per_tok": [1, 2],
    "num_key_value_heads": [1, 2],
    "original_max_position_embeddings": [77],
    "q_lora_rank": [12],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}],
    "sliding_window": [7, 9],
    "time_step_limit": [[0.01, 0.2]],
    "position_embedding_type": ["nope"],
    "mamba_d_head": [7],
    "mamba_d_ssm": [192],
    "mlp_multipliers": [[0.5, 0.5]],
    "ssm_multipliers": [[0.5, 0.75, 1.5, 1.3, 0.6]],
    "mlp_hidden_act": ["relu"],
    "mamba_hidden_act": ["relu"],
    "layers_block_type": [["moe", "mamba", "attention", "moe", "mamba"]],
    "use_bidirectional_attention": ["all"],
    "topk_method": ["noaux", "group_limited_greedy"],
    "attn_config": [{"alibi_bias_max": 4}],
    "norm_type": ["rmsnorm"],
}
"""Values for keys where it matters which; other flags are turned round, and other numbers are made another."""


WITHOUT_CLASS = ("baichuan",)
"""Types that are published with code of their own; `test_baichuan.py` tries it."""


def tiny_text(name: str) -> dict[str, Any]:
    """The tiny model's config.json, or the part of it about the language model of one that sees images."""
    config = tiny_config(name)
    return config["text_config"] if name in VISION else config


def config_of(model_type: str) -> tuple[str, type]:
    """A tiny model of this type, and transformers' configuration class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of_type = (name for name in VARIANTS | ENCODERS | VISION if tiny_text(name)["model_type"] == model_type)
    name = MODELS.get(model_type) or next(of_type)
    return name, CONFIG_MAPPING[model_type]


def keys_of(model_type: str) -> list[str]:
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(config_of(model_type)[1]) if field.name not in common]


def has_class(model_type: str) -> bool:
    """Whether this transformers knows the type: the oldest one that is supported lacks the newest."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type not in WITHOUT_CLASS and model_type in CONFIG_MAPPING


CASES = [
    (kind, key)
    for family in FAMILIES
    for kind in family.model_types
    if has_class(kind)
    for key in keys_of(kind)
    if key not in HARMLESS and (kind, key) not in WITHOUT_MEANING
]


def other_value(key: str, value: Any, layers: int) -> Any:
    """What `key` is changed to from `value`."""
    if key in OTHERS:
        return next(other for other in OTHERS[key] if other != value)
    if key == "no_rope_layers":
        return [0] * layers
    if key == "mlp_layer_types":
        return ["sparse"] * layers
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, int) else value / 2


def other_layer(model_type: str) -> str:
    """A type of layer that the family has besides full attention."""
    family = next(family for family in FAMILIES if model_type in family.model_types)
    return next(kind for kind in family.layer_types if kind != "full_attention")


def read(directory: Path, config: dict[str, Any]) -> DecoderConfig | str:
    """The model of this config, or why it is refused."""
    (directory / "config.json").write_text(json.dumps(config))
    try:
        return model_spec(open_checkpoint(directory, "dummy")).config
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(("model_type", "key"), CASES)
def test_a_key_is_read_or_refused(model_type, key, tmp_path):
    name, kind = config_of(model_type)
    config = tiny_text(name)
    if "use_sliding_window" in keys_of(model_type):
        config |= WINDOWS
    if key == "layer_types":
        config["layer_types"] = [other_layer(model_type), *["full_attention"] * (config["num_hidden_layers"] - 1)]
    if key == "rope_parameters":  # the older spelling goes before it
        config.pop("rope_scaling", None)
    default = next(field.default for field in dataclasses.fields(kind) if field.name == key)
    before = read(tmp_path, config)
    assert isinstance(before, DecoderConfig), before
    layers = next(config[key] for key in LAYERS if key in config)
    turned_round = ["full_attention", *[other_layer(model_type)] * (layers - 1)]
    value = turned_round if key == "layer_types" else other_value(key, config.get(key, default), layers)
    assert read(tmp_path, config | {key: value}) != before


NOT_NULL = {
    ("deepseek_v2", "num_experts_per_tok"), ("deepseek_v2", "topk_method"), ("deepseek_v3", "v_head_dim"),
    ("deepseek_v3", "n_group"), ("deepseek_v3", "topk_group"), ("deepseek_v3", "num_experts_per_tok"),
    ("deepseek_v3", "first_k_dense_replace"), ("glm", "head_dim"),
    ("cohere", "logit_scale"), ("cohere", "layer_norm_eps"), ("ernie4_5_moe", "moe_k"),
    ("ernie4_5_moe", "moe_norm_min"), ("ernie4_5_moe", "moe_num_experts"), ("ernie4_5_moe", "moe_num_shared_experts"),
    ("ernie4_5_moe", "moe_layer_start_index"), ("ernie4_5_moe", "moe_layer_end_index"),
    ("ernie4_5_moe", "moe_layer_interval"), ("mistral4", "v_head_dim"), ("mistral4", "num_experts_per_tok"),
    ("mistral4", "first_k_dense_replace"), ("granitemoehybrid", "mamba_n_heads"),
    ("granitemoehybrid", "mamba_n_groups"),
    ("granitemoehybrid", "mamba_d_state"), ("granitemoehybrid", "mamba_d_head"), ("granitemoehybrid", "mamba_d_conv"),
    ("granitemoehybrid", "mamba_expand"), ("granitemoehybrid", "num_local_experts"),
    ("granitemoehybrid", "num_experts_per_tok"), ("granitemoehybrid", "embedding_multiplier"),
    ("granitemoehybrid", "attention_multiplier"), ("granitemoehybrid", "residual_multiplier"),
    ("granitemoehybrid", "logits_scaling"), ("falcon_h1", "mamba_n_heads"), ("falcon_h1", "mamba_d_head"),
    ("falcon_h1", "mamba_d_state"), ("falcon_h1", "mamba_n_groups"), ("falcon_h1", "mamba_d_conv"),
    ("falcon_h1", "mamba_expand"), ("falcon_h1", "embedding_multiplier"),
    *((kind, key) for kind in ("granitemoe", "granitemoeshared", "granitemoe_swa") for key in (
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "num_local_experts",
        "num_experts_per_tok",
    )),
    *(("dots1", key) for key in (
        "n_routed_experts", "n_group", "topk_group", "norm_topk_prob", "num_experts_per_tok", "max_window_layers",
        "first_k_dense_replace",
    )),
    *(("sarvam_mla", key) for key in (
        "v_head_dim", "n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace",
    )),
    *(("hy_v3", key) for key in ("num_experts", "num_experts_per_tok", "num_shared_experts")),
    *(("afmoe", key) for key in (
        "num_dense_layers", "num_experts", "num_experts_per_tok", "num_shared_experts", "route_scale",
        "global_attn_every_n_layers",
    )),
    ("youtu", "v_head_dim"),
}  # fmt: skip
"""Keys that the class lets be null, and without which its model cannot be built, or not at this size."""
SIZES = {
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "num_experts_per_tok",
    "linear_num_key_heads",
}
"""Keys whose defaults do not go with a tiny model's others."""
OWN_SIZES = {
    ("mamba2", "num_heads"), ("mamba2", "head_dim"), ("mamba2", "n_groups"), ("granitemoehybrid", "mamba_n_heads"),
    ("falcon_h1", "mamba_n_heads"), ("falcon_h1", "mamba_d_ssm"), ("gptj", "n_head"), ("codegen", "n_head"),
    ("gptj", "rotary_dim"), ("codegen", "rotary_dim"),
    ("gpt_neo", "num_layers"), ("dots1", "n_routed_experts"), ("granitemoe", "num_experts_per_tok"),
}  # fmt: skip
"""Those of one family."""


UNSUITED = {("gemma4_text", "layer_types"), ("hunyuan_v1_moe", "num_experts")}
"""Keys whose defaults do not go with others of that tiny model."""


@pytest.mark.parametrize("model_type", [kind for family in FAMILIES for kind in family.model_types if has_class(kind)])
def test_what_transformers_itself_writes_is_read(model_type, tmp_path):
    """A config that it saves, each key at its class's default, and null where the class lets it be."""
    name, kind = config_of(model_type)
    config = tiny_text(name)
    before = read(tmp_path, config)
    saved = json.loads(kind(**config).to_json_string(use_diff=False))
    assert read(tmp_path, saved) == before
    if model_type == "deepseek_v2":  # whose groups may be null where the best experts are chosen among all
        config["topk_method"] = "greedy"
    for field in dataclasses.fields(kind):
        if field.name in keys_of(model_type):
            if (model_type, field.name) in UNSUITED:
                continue
            fixed = field.name in SIZES or (model_type, field.name) in OWN_SIZES
            values = [] if fixed or field.default is dataclasses.MISSING else [field.default]
            values += [None] if "None" in str(field.type) and (model_type, field.name) not in NOT_NULL else []
            found = [read(tmp_path, config | {field.name: value}) for value in values]
            assert [one for one in found if isinstance(one, str)] == [], field.name


CLASSES = [kind for family in FAMILIES for kind in family.model_types if has_class(kind)]
NO_MODELS = {
    "deepseek_v2": "num_experts_per_tok is null",
    "dots1": "n_routed_experts is null",
    "glm4_moe": "a head's 21 rotary channels are no pairs",
    "glm4v_moe_text": "a head's 21 rotary channels are no pairs",
}
"""Classes whose defaults are no model, each with the reason."""


@pytest.mark.parametrize("model_type", [kind for kind in CLASSES if kind not in NO_MODELS])
def test_the_default_of_each_class_is_read_as_transformers_saves_it(model_type, tmp_path):
    found = config_of(model_type)[1]()
    found.save_pretrained(tmp_path)
    type(found).from_pretrained(tmp_path).save_pretrained(tmp_path)
    for saved in ((tmp_path / "config.json").read_text(), found.to_json_string(use_diff=False)):
        config = read(tmp_path, json.loads(saved))
        assert isinstance(config, DecoderConfig), config


OWN_HEADS = "transformers takes it from any configuration that has it, whatever its class says"
READ_ALL_THE_SAME = {
    **{(kind, "head_dim"): OWN_HEADS for kind in (
        "cohere", "cohere2", "ernie4_5_moe", "granite", "granitemoehybrid", "olmo2", "olmo3", "phi", "qwen2",
        "qwen2_moe", "smollm3", "starcoder2", "apertus", "dots1", "granitemoe", "granitemoeshared", "granitemoe_swa",
        "granite_swa", "nanochat", "olmo", "olmoe", "flex_olmo", "apertus1p5_text",
        "emu3_text_model",
    )},
    **{(kind, "original_max_position_embeddings"): "published files have it beside rope_parameters" for kind in (
        "deepseek_v2", "deepseek_v3", "exaone4", "gpt_oss", "llama4_text", "apertus", "apertus1p5_text", "cwm",
        "ministral3", "mistral4", "olmo3",
    )},
    **{(kind, "position_embedding_type"): "older files have it; other ones than learnt positions are refused"
       for kind in ("bert", "roberta", "xlm-roberta")},
    ("nomic_bert", "activation_function"): "published files have the keys of the model's own code",
    ("nomic_bert", "num_experts"): "published files have the keys of the model's own code",
    ("hunyuan_v1_moe", "moe_intermediate_size"): "published files have it",
    ("glm4v_text", "attention_bias"): "published files have it",
    ("qwen3_vl_moe_text", "norm_topk_prob"): "published files have it",
    ("mamba2", "max_position_embeddings"): "the length that is served, where a file says one",
    **{("gemma4_unified_text", key): "of the class that it is a variety of" for key in (
        "enable_moe_block", "hidden_size_per_layer_input", "top_k_experts",
    )},
}  # fmt: skip
"""Keys of other classes that are read, each with the reason."""
FOREIGN = {
    field.name: field.default
    for kind in CLASSES
    for field in dataclasses.fields(config_of(kind)[1])
    if field.name in keys_of(kind) and field.name not in HARMLESS and (field.name in OTHERS or field.default)
}
"""Keys of any class, each with the default of one; `add_cross_attention` is refused everywhere."""


@pytest.mark.parametrize("model_type", CLASSES)
def test_keys_of_other_classes_are_ignored(model_type, tmp_path):
    name, kind = config_of(model_type)
    config = tiny_text(name)
    before = read(tmp_path, config)
    known = {*keys_of(model_type), *kind.attribute_map, *config, *NOT_ALIKE}
    layers = next(config[key] for key in LAYERS if key in config)
    values = {
        key: other_value(key, FOREIGN[key], layers)
        for key in sorted(FOREIGN.keys() - known)
        if FOREIGN[key] is not dataclasses.MISSING and (model_type, key) not in READ_ALL_THE_SAME
    }
    found = {key: read(tmp_path, config | {key: value}) for key, value in values.items()}
    assert {key: one if isinstance(one, str) else "read" for key, one in found.items() if one != before} == {}


NOT_ALIKE = ("layers_block_type", "layer_types", "use_bidirectional_attention")
"""Keys whose values are of other kinds in other classes, and are refused for it."""
