"""EAGLE-3 heads against their definition in float64, and heads that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.predictor import Eagle3Spec, eagle3_spec
from jaxllm.models.registry import model_spec
from jaxllm.weights import open_checkpoint
from tests.models.eagle3_head import LAYERS, Definition, head_config, head_weights, write_head, write_model
from tests.models.predicting import predicted
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights

TOKENS = 21
NAME = "llama_gqa"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DecoderConfig:
    checkpoint = open_checkpoint(write_model(NAME, tmp_path_factory.mktemp("model")))
    return model_spec(checkpoint).config


def spec_of(directory: Path, model: DecoderConfig) -> Eagle3Spec:
    return eagle3_spec(open_checkpoint(directory), model)


def speculators(c: dict[str, Any]) -> dict[str, Any]:
    """The same in speculators' form, whose heads norm the state before they add to it."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    layer = {key: value for key, value in c.items() if key not in ("architectures", *own)}
    rest = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": None}
    return rest | {key: c[key] for key in own} | {"transformer_layer_config": layer}


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_states_are_as_defined(form, model, tmp_path):
    config, weights = head_config(NAME), head_weights(NAME)
    written, defined = config, config
    if form == "speculators":
        weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
        weights["embed_tokens.weight"] = np.ones((config["vocab_size"], config["hidden_size"]), np.float32)
        written, defined = speculators(config), config | {"norm_before_residual": True}
    save_checkpoint(written, weights, tmp_path)
    dice, size = np.random.default_rng(2), config["hidden_size"]
    embeddings = dice.standard_normal((TOKENS, size)).astype(np.float32)
    states = dice.standard_normal((TOKENS, len(LAYERS) * size)).astype(np.float32)
    definition = Definition(head_weights(NAME), defined)
    expected = definition.state(embeddings, definition.read(states))
    checkpoint = open_checkpoint(tmp_path)
    spec = eagle3_spec(checkpoint, model)
    assert spec.eagle.own_embedding == (form == "speculators")
    for cuts in ([TOKENS], [7, 8, 20, TOKENS]):
        found = predicted(checkpoint, spec, embeddings, states, cuts)
        np.testing.assert_allclose(found.state, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.hidden, definition.norm(expected, "norm"), rtol=1e-3, atol=1e-4)


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("count", "stated", "layers"),
    [
        (32, {IDS: None}, (2, 16, 29)),
        (32, {IDS: [3, 9, 20]}, (3, 9, 20)),
        (94, {IDS: None, "eagle_config": {IDS: [1, 46, 90]}}, (2, 47, 91)),
        (48, {IDS: None, "eagle_config": {"use_aux_hidden_state": True}}, (2, 24, 45)),
    ],
)
def test_which_states_a_head_reads(count, stated, layers, model, tmp_path):
    """vLLM names the layers in front of which they are, and SpecForge those before them."""
    (layer, *_) = model.layers
    large = DecoderConfig(**vars(model) | {"layers": (layer,) * count})
    assert spec_of(write_head(NAME, tmp_path, **stated), large).eagle.layers == layers


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\]; accepted are Llama"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; accepted is llama"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; accepted is 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False; accepted is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True; accepted is False"),
        ({IDS: [0, 1, 3]}, "in front of the layers 0, 1, 3; accepted are 3 of the 3 layers"),
        ({IDS: [0, 1]}, "a list of 3 entries"),
        ({"target_hidden_size": 4096}, "a model with states of 4096 channels; accepted is 64"),
        ({"vocab_size": 300}, "vocab_size is 300; accepted is the model's, 257"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_other_heads_are_refused_in_one_line(differences, reason, model, tmp_path):
    with pytest.raises(CheckpointError, match=reason) as error:
        spec_of(write_head(NAME, tmp_path, **differences), model)
    assert "\n" not in str(error.value)


def test_a_model_that_is_no_head_is_refused(model, tmp_path):
    config = tiny_config(NAME) | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    save_checkpoint(config, tiny_weights(NAME), tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tensor 'fc\.weight'; accepted is an EAGLE-3 head"):
        spec_of(tmp_path, model)


def test_tokens_that_the_model_lacks_are_refused(model, tmp_path):
    weights = head_weights(NAME)
    save_checkpoint(head_config(NAME), weights | {"d2t": weights["d2t"] + 200}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec, nothing = eagle3_spec(checkpoint, model), np.zeros((1, 64), np.float32)
    with pytest.raises(CheckpointError, match=r"'d2t' names tokens 203 … 45\d; accepted are 0 … 256"):
        predicted(checkpoint, spec, nothing, np.zeros((1, 192), np.float32), [1])
