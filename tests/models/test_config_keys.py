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
from tests.reference.tiny_configs import VARIANTS

pytest.importorskip("transformers")

HARMLESS = {
    "attention_dropout": "in training only",
    "embd_pdrop": "in training only",
    "hidden_dropout": "in training only",
    "resid_pdrop": "in training only",
    "residual_dropout": "in training only",
    "embedding_dropout": "in training only",
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
    "num_nextn_predict_layers": "layers past the last, whose tensors are left out",
    "num_mtp_layers": "layers past the last, whose tensors are left out",
}
"""Keys that change no logits, each with its reason."""

WITHOUT_MEANING = {
    ("ministral3", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v2", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v3", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("mistral4", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("gpt_oss", "max_position_embeddings"): "YaRN's context is its factor times the original length",
    ("deepseek_v2", "head_dim"): "transformers replaces it by qk_rope_head_dim",
    ("deepseek_v3", "head_dim"): "transformers replaces it by qk_rope_head_dim",
    ("stablelm", "head_dim"): "transformers shares the hidden size out among the heads",
}
"""Keys that a family's own other keys decide, each with its reason."""

MODELS = {"phi3": "phi3_longrope_long", "deepseek_v2": "deepseek_v2"}
"""Tiny models in which all keys have a meaning, where the first of its type has some without."""

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
"""What gives the other keys of windows a meaning in the families that have the first."""

OTHERS: dict[str, list[Any]] = {
    "attn_logit_softcapping": [3.0],
    "decoder_sparse_step": [2],
    "final_logit_softcapping": [3.0],
    "first_k_dense_replace": [2],
    "full_attn_idxs": [[1]],
    "head_dim": [16],
    "hidden_act": ["relu", "gelu_new"],
    "hidden_activation": ["relu", "gelu_new"],
    "intermediate_size": [200],
    "max_window_layers": [0],
    "mlp_only_layers": [[0]],
    "no_rope_layer_interval": [2],
    "num_experts_per_tok": [1],
    "num_key_value_heads": [1, 2],
    "original_max_position_embeddings": [77],
    "q_lora_rank": [12],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}],
    "sliding_window": [7, 9],
    "topk_method": ["noaux", "group_limited_greedy"],
}
"""Values for keys where it matters which; other flags are turned round, and other numbers are made another."""


def config_of(model_type: str) -> tuple[str, type]:
    """A tiny model of this type, and transformers' configuration class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of_type = (name for name, variant in VARIANTS.items() if variant.config["model_type"] == model_type)
    name = MODELS.get(model_type) or next(of_type)
    return name, CONFIG_MAPPING[model_type]


def keys_of(model_type: str) -> list[str]:
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(config_of(model_type)[1]) if field.name not in common]


CASES = [
    (kind, key)
    for family in FAMILIES
    for kind in family.model_types
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
    config = tiny_config(name)
    if "use_sliding_window" in keys_of(model_type):
        config |= WINDOWS
    if key == "layer_types":
        config["layer_types"] = [other_layer(model_type), *["full_attention"] * (config["num_hidden_layers"] - 1)]
    if key == "rope_parameters":  # the older spelling goes before it
        config.pop("rope_scaling", None)
    default = next(field.default for field in dataclasses.fields(kind) if field.name == key)
    before = read(tmp_path, config)
    assert isinstance(before, DecoderConfig), before
    layers = config["num_hidden_layers"]
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
    ("mistral4", "first_k_dense_replace"),
}  # fmt: skip
"""Keys that the class lets be null, and without which its model cannot be built, or not at this size."""
SIZES = {"num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "num_experts_per_tok"}
"""Keys whose defaults do not go with a tiny model's others."""


@pytest.mark.parametrize("model_type", [kind for family in FAMILIES for kind in family.model_types])
def test_what_transformers_itself_writes_is_read(model_type, tmp_path):
    """A config that it saves, each key at its class's default, and null where the class lets it be."""
    name, kind = config_of(model_type)
    config = tiny_config(name)
    before = read(tmp_path, config)
    saved = json.loads(kind(**config).to_json_string(use_diff=False))
    assert read(tmp_path, saved) == before
    if model_type == "deepseek_v2":  # whose groups may be null where the best experts are chosen among all
        config["topk_method"] = "greedy"
    for field in dataclasses.fields(kind):
        if field.name in keys_of(model_type):
            values = [] if field.name in SIZES or field.default is dataclasses.MISSING else [field.default]
            values += [None] if "None" in str(field.type) and (model_type, field.name) not in NOT_NULL else []
            found = [read(tmp_path, config | {field.name: value}) for value in values]
            assert [one for one in found if isinstance(one, str)] == [], field.name
