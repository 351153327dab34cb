"""config.json and generation_config.json: opened, parsed, planned."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from jaxllm import EngineConfig
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import CheckpointError
from jaxllm.models.layers.rope import inverse_frequencies
from jaxllm.models.registry import model_spec
from jaxllm.models.tasks import read_tasks
from jaxllm.requests.sampling import SamplingParams
from jaxllm.weights import open_checkpoint
from tests.fuzz.harness import COUNTS, check_message, fuzz
from tests.fuzz.mutants import json_bytes, mutate_json, pick
from tests.reference.tiny import TINY_MODELS, tiny_config
from tests.reference.tiny_configs import CLASSIFIERS

CONFIGS = [tiny_config(name) for name in (*TINY_MODELS, *CLASSIFIERS)]
ROOMY = Platform("cpu", 1, 2**40, 2**40)
SHARE_PLANNED = 0.02
"""Planning traces a whole model, which takes a hundred times as long as the rest."""


@COUNTS
def test_a_config_json_is_understood_or_refused(count, tmp_path):
    def attempt(rng: np.random.Generator) -> None:
        config = mutate_json(rng, CONFIGS[rng.integers(len(CONFIGS))])
        (tmp_path / "config.json").write_bytes(json_bytes(rng, config))
        checkpoint = open_checkpoint(tmp_path, "dummy")
        spec = model_spec(checkpoint)
        read_tasks(checkpoint)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(np.isfinite(inverse_frequencies(rope)).all() for rope in spec.config.ropes)
        if rng.random() < SHARE_PLANNED:
            make_blueprint(EngineConfig(model=str(tmp_path), load_format="dummy"), checkpoint, ROOMY)

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count * 9 / 10  # a table that refuses everything would prove nothing


@COUNTS
def test_a_generation_config_gives_sampling_parameters_or_is_refused(count, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    valid = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1, "do_sample": True,
        "eos_token_id": [1, 2], "bos_token_id": 1, "transformers_version": "4.51.0",
    }  # fmt: skip

    def attempt(rng: np.random.Generator) -> None:
        (tmp_path / "generation_config.json").write_bytes(json_bytes(rng, mutate_json(rng, valid)))
        given = open_checkpoint(tmp_path, "dummy").generation_config
        named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        SamplingParams(**{name: given[name] for name in named if given.get(name) is not None})

    assert 0 < fuzz(count, attempt) < count


@COUNTS
def test_the_steps_of_an_embedding_model_are_understood_or_refused(count, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    (tmp_path / "1_Pooling").mkdir()
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}

    def attempt(rng: np.random.Generator) -> None:
        of_steps = bool(rng.integers(2))
        (tmp_path / "modules.json").write_bytes(json_bytes(rng, mutate_json(rng, steps) if of_steps else steps))
        modes = pooling if rng.integers(2) else {"pooling_mode": pick(rng, "mean", ["cls"])}
        written = modes if of_steps else mutate_json(rng, modes)
        (tmp_path / "1_Pooling" / "config.json").write_bytes(json_bytes(rng, written))
        read_tasks(open_checkpoint(tmp_path, "dummy"))

    assert 0 < fuzz(count, attempt) < count


def test_a_flag_that_is_null_is_false(tmp_path):
    """As torch takes it; inputs 8,046 and 8,543 of 100,000."""
    null = {"attention_bias": None, "mlp_bias": None, "tie_word_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama_gqa") | null))
    config = model_spec(open_checkpoint(tmp_path, "dummy")).config
    flags = (config.qkv_bias, config.output_bias, config.mlp_bias, config.tie_word_embeddings)
    assert flags == (False, False, False, False)


def test_a_name_too_long_for_a_file_is_refused_in_short(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    steps = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "x" * 4000, "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(CheckpointError, match="File name too long") as caught:
        read_tasks(open_checkpoint(tmp_path, "dummy"))
    check_message(str(caught.value))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden_size", "64", "hidden_size is '64'; accepted is an integer from 1"),
        ("hidden_size", 64.0, "hidden_size is 64.0; accepted is an integer from 1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; accepted is an integer from 1 to 1024"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_key_value_heads", 3, "the number of key-value heads is 3; accepted is a divisor of 4 heads"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan; accepted is a number from 0 to 1"),
        ("hidden_act", "swish", "the activation is 'swish'; accepted is silu"),
        ("rope_scaling", [], "rope_scaling is [];"),
        ("rope_scaling", {"rope_type": "yarn", "factor": -1}, "rope_scaling.factor is -1"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}, "rope_scaling.factor is '4'"),
        ("rope_theta", 0.5, "rope_theta is 0.5"),
        ("architectures", "LlamaForCausalLM", "architectures is 'LlamaForCausalLM'"),
        ("model_type", ["llama"], "model_type is ['llama']; supported are"),
        ("quantization_config", "fp8", "quantization_config is 'fp8'; accepted is an object"),
        ("eos_token_id", -1, "eos_token_id is -1"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(field, value, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama_gqa") | {field: value}))
    with pytest.raises(Exception) as caught:
        model_spec(open_checkpoint(tmp_path, "dummy"))
    check_message(str(caught.value))
    assert says in str(caught.value)


def test_an_empty_scaling_is_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama_gqa") | {"rope_scaling": {}}))
    assert model_spec(open_checkpoint(tmp_path, "dummy")).config.ropes[0].kind == "default"
