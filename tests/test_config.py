"""Settings: sizes in bytes, and the one line that a wrong one gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from jaxllm.config import EngineConfig, ModelConfig, ServeConfig, make_config
from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.wording import did_you_mean


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1073741824, 2**30), ("1073741824", 2**30), ("1GiB", 2**30), ("1gib", 2**30), ("1Gi", 2**30), ("1 GiB", 2**30),
        ("500MB", 500 * 10**6), ("500 MB", 500 * 10**6), ("500m", 500 * 10**6), ("1.5GiB", 3 * 2**29), ("2k", 2000),
        ("2KiB", 2048), ("1TB", 10**12), ("0.5TiB", 2**39), ("7B", 7),
    ],
)  # fmt: skip
def test_bytes_are_read_as_they_are_written(value, number):
    assert EngineConfig(kv_cache_memory=value).kv_cache_memory == number


@pytest.mark.parametrize("value", ["", "GiB", "4 gigs", "four", "1e999", "nan", "-1GiB", 0, "0"])
def test_what_is_no_size_is_refused_in_one_line(value):
    with pytest.raises(ConfigError) as error:
        make_config(EngineConfig, kv_cache_memory=value)
    message = str(error.value)
    assert message.startswith(f"kv_cache_memory is {value!r}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30d", 30 * 86_400), ("12h", 43_200), ("90m", 5_400), ("1.5 d", 129_600), ("45s", 45), ("45", 45), (45, 45)],
)
def test_times_are_read_as_they_are_written(value, seconds):
    assert ServerConfig(store_retention=value).store_retention == seconds


@pytest.mark.parametrize("value", ["", "d", "30 days", "soon", "nan", "inf", "1e999", "-1d", 0, "0d"])
def test_what_is_no_time_is_refused_in_one_line(value):
    with pytest.raises(ConfigError) as error:
        make_config(ServerConfig, store_retention=value)
    message = str(error.value)
    assert message.startswith(f"store_retention is {value!r}: ") and "\n" not in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_length", "'max_model_len'"),
        ("tensor_parallel", "'tensor_parallel_size'"),
        ("max_batched_tokens", "'max_num_batched_tokens'"),
        ("zzz", None),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest(name, hint):
    with pytest.raises(ConfigError) as error:
        make_config(EngineConfig, **{name: 1})
    assert str(error.value) == f"unknown setting {name!r}" + (f"; did you mean {hint}?" if hint else "")


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("dtype", "int8", "'float32', 'bfloat16' or 'float16'"),
        ("block_size", 10, "8, 16, 32, 64 or 128"),
        ("load_format", "pickle", "'gguf', 'orbax' or 'dummy'"),
        ("tensor_parallel_size", 0, "1 or more"),
        ("max_num_seqs", 5000, "at most 4096"),
        ("max_num_batched_tokens", 8, "16 or more"),
        ("gpu_memory_utilization", 1.5, "at most 1"),
        ("max_model_len", "long", "integer"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_accepted(name, value, accepted):
    with pytest.raises(ConfigError) as error:
        make_config(EngineConfig, **{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r}: ") and accepted in message and "\n" not in message


def test_the_server_takes_the_engines_settings_too():
    config = make_config(ServeConfig, model="m", port=0, max_num_seqs=4, max_body_size="1MiB")
    assert isinstance(config, EngineConfig)
    assert (config.port, config.max_num_seqs, config.max_body_size) == (0, 4, 2**20)
    with pytest.raises(ConfigError, match="unknown setting 'port'"):
        make_config(EngineConfig, port=0)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, "multi_process is true, and tensor_parallel_size is 1, so that there would be one process: accepted are "),
        ({"tensor_parallel_size": 2, "num_processes": 2}, "num_processes is 2, and multi_process is true, which sets "),
        ({"tensor_parallel_size": 2, "process_id": 0}, "process_id is 0, and multi_process is true, which sets "),
        ({"tensor_parallel_size": 2, "cluster": "ompi"}, "cluster is ompi, and multi_process is true: it starts "),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size is 2, and multi_process is true: "),
        ({"tensor_parallel_size": 2, "engine_process": False}, "engine_process is false, and multi_process is true: "),
        ({"tensor_parallel_size": 2, "kv_offload_memory": "1GiB"}, "kv_offload_memory is set, and multi_process: "),
    ],
)
def test_processes_are_started_only_where_they_make_sense(others, said):
    with pytest.raises(ConfigError) as error:
        make_config(EngineConfig, multi_process=True, **others)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_settings_do_not_change_after_they_are_made():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().seed = 3  # type: ignore[misc]


def test_did_you_mean_is_silent_when_nothing_is_near():
    assert did_you_mean("llama4", ["llama", "gemma3"]) == "; did you mean 'llama'?"
    assert did_you_mean("mamba", ["qwen", "gpt"]) == ""


def test_a_server_and_its_model_have_settings_of_their_own() -> None:
    config = make_config(ServeConfig, model="m", max_num_seqs=4, chat_template="c.jinja", port=0, vllm_metrics=True)
    model, server = config.of_model, config.of_server
    assert type(model) is ModelConfig and type(server) is ServerConfig
    assert (model.model, model.max_num_seqs, model.chat_template) == ("m", 4, Path("c.jinja"))
    assert (server.port, server.vllm_metrics) == (0, True)
    assert not ModelConfig.model_fields.keys() & ServerConfig.model_fields.keys()
    assert {**model.model_dump(), **server.model_dump()} == config.model_dump()


@pytest.mark.parametrize(("setting", "names"), [(None, ["m"]), ("a", ["a"]), (" a, b,", ["a", "b"])])
def test_names_of_a_model(setting: str | None, names: list[str]) -> None:
    assert ModelConfig(model="m", served_model_name=setting).names == names


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_no_example_opens_a_port_to_other_machines_without_a_key(path: Path) -> None:
    config = make_config(ServeConfig, **yaml.safe_load(path.read_text(encoding="utf-8")))
    assert config.host in ("127.0.0.1", "localhost", "::1") or config.api_key is not None


NEEDS_MORE = ("log_prompts", "multi_process", "prefix_affinity", "enable_dp_attention")
"""Switches that are refused without other settings."""


@pytest.mark.parametrize("name", ServeConfig.model_fields)
def test_a_switch_is_no_number(name):
    """`max_model_len: yes` in a YAML file would be a context of one token."""
    kinds = str(ServeConfig.model_fields[name].annotation)
    for switch in (True, False):
        try:
            value = getattr(ServeConfig(**{name: switch}), name)
        except ValidationError as error:
            assert "bool" not in kinds or name in (
                "log_prompts",
                "multi_process",
                "prefix_affinity",
                "enable_dp_attention",
            ), error
        else:
            assert value is switch and "bool" in kinds


def test_a_switch_is_no_number_inside_a_setting_either():
    with pytest.raises(ConfigError, match=r"^port is True: it must be a number$"):
        make_config(ServeConfig, port=True)
    for settings in (
        {"speculative_config": {"num_speculative_tokens": True}},
        {"lora_modules": [{"name": "a", "path": "/a", "scale": True}]},
    ):
        with pytest.raises(ConfigError, match=r"it must be a number"):
            make_config(ServeConfig, **settings)
