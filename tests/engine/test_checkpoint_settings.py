"""Settings that change what an engine sees of its checkpoint, or check it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.tokenizer import open_model, resolve_tokenizer
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.registry import model_spec
from tests.serving.mixed_requests import write_model
from tests.weights.models import real_model

RECOMMENDED = {"temperature": 0.3, "top_k": 7, "eos_token_id": [2]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return path


def recommended(model: Path, **settings: Any) -> dict[str, Any]:
    return open_model(EngineConfig(model=str(model), **settings), model).generation_config


def test_overrides_reach_the_model(model: Path) -> None:
    of_file = json.loads((model / "config.json").read_text())
    config = EngineConfig(model=str(model), hf_overrides={"max_position_embeddings": 48})
    assert of_file["max_position_embeddings"] != 48
    assert plan_engine(config).max_model_len == 48


def test_an_object_is_overridden_key_by_key(model: Path, tmp_path: Path) -> None:
    nested = write_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    overrides = {"rope_parameters": {"rope_theta": 5e5}}
    config = open_model(EngineConfig(model=str(nested), hf_overrides=overrides), nested).config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


def test_a_wrong_override_is_refused_as_in_the_file(model: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        plan_engine(EngineConfig(model=str(model), hf_overrides={"num_hidden_layers": "many"}))


@pytest.mark.parametrize("setting", [{"quantization": "awq"}, {"quantization": "gguf"}])
def test_quantization_that_the_files_do_not_have_is_refused(model: Path, setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"quantization is '{setting['quantization']}', but .* is not quantized"):
        plan_engine(EngineConfig(model=str(model), **setting))


@pytest.mark.parametrize("name", ["gptq", "gptq_marlin"])
def test_quantization_that_the_files_have(model: Path, name: str) -> None:
    overrides = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    config = EngineConfig(model=str(model), quantization=name, hf_overrides=overrides)
    assert open_model(config, model).config["quantization_config"]["bits"] == 4
    with pytest.raises(ConfigError, match="quantized with gptq"):
        open_model(config.model_copy(update={"quantization": "fp8"}), model)


@pytest.mark.parametrize("name", ["modelopt", "modelopt_fp4", "modelopt_mxfp8"])
def test_quantization_by_a_kernels_name(model: Path, name: str) -> None:
    overrides = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    open_model(EngineConfig(model=str(model), quantization=name, hf_overrides=overrides), model).close()


def test_gguf_is_a_quantization() -> None:
    path = real_model("smollm2-135m")
    open_model(EngineConfig(model="smollm2-135m", quantization="gguf"), path).close()


def test_the_context_of_a_gguf_file_is_stretched() -> None:
    path = real_model("smollm2-135m")
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}
    checkpoint = open_model(EngineConfig(hf_overrides=overrides), path)
    config, stated = model_spec(checkpoint).config, checkpoint.config["llama.context_length"]
    rope = config.layers[0].rope
    assert rope is not None and (rope.kind, rope.factor, rope.theta, rope.original_length) == ("yarn", 4, 5e5, stated)
    assert config.max_position_embeddings == 4 * stated
    checkpoint.close()


def test_what_is_not_read_of_a_gguf_file_is_not_overridden() -> None:
    checkpoint = open_model(EngineConfig(hf_overrides={"thinking": 1}), real_model("smollm2-135m"))
    with pytest.raises(CheckpointError, match="hf_overrides has 'thinking', which is not read of a GGUF file"):
        model_spec(checkpoint)
    checkpoint.close()


def test_a_new_key_of_the_rotary_embedding_wins_over_the_old_one_of_a_file(tmp_path: Path) -> None:
    old = write_model(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})
    overrides = {"rope_parameters": {"type": "yarn", "factor": 4.0}}
    config = open_model(EngineConfig(model=str(old), hf_overrides=overrides), old).config
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0} and "rope_parameters" not in config


def test_where_defaults_come_from(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 9}')
    assert recommended(model) == RECOMMENDED
    assert recommended(model, generation_config="vllm") == {"eos_token_id": [2]}
    assert recommended(model, generation_config=str(tmp_path)) == {"top_p": 0.5, "eos_token_id": 9}
    overridden = recommended(model, override_generation_config={"top_k": None, "min_p": 0.1})
    assert overridden == RECOMMENDED | {"top_k": None, "min_p": 0.1}
    more = recommended(model, override_generation_config={"max_new_tokens": 5, "frequency_penalty": 1.1})
    assert more == RECOMMENDED | {"max_tokens": 5, "frequency_penalty": 1.1}


def test_tokens_that_end_a_text_are_those_of_both_folders(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    tokenizer = resolve_tokenizer(EngineConfig(model=str(model), generation_config=str(tmp_path)))
    assert tokenizer is not None and tokenizer.eos_token_ids == [2, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_config": "/no/folder"}, "generation_config is '/no/folder'; it must be auto, vllm, or a folder"),
        ({"override_generation_config": {"top_j": 1}}, "override_generation_config has 'top_j'; accepted are temperat"),
        ({"override_generation_config": {"top_p": 7}}, "override_generation_config: top_p is 7"),
    ],
)
def test_defaults_that_cannot_be_used_are_refused(model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recommended(model, **settings)
