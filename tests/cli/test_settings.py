"""Where a setting comes from: flag over variable over YAML over default."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.config.sources import read_settings
from jaxllm.config.values import comma_separated
from jaxllm.errors import ConfigError

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_each_source_wins_over_the_next(cli, served, yaml_file, monkeypatch) -> None:
    path = str(yaml_file("port: 1\nmax_num_seqs: 2\nseed: 3\n"))
    monkeypatch.setenv("JAXLLM_PORT", "11")
    monkeypatch.setenv("JAXLLM_MAX_NUM_SEQS", "12")
    assert cli("serve", "--config", path, "--port", "21").code == 0
    assert (served[0].port, served[0].max_num_seqs, served[0].seed, served[0].block_size) == (21, 12, 3, 16)


@pytest.mark.parametrize(
    ("variables", "keys"),
    [
        ({"VLLM_API_KEY": "v"}, ["v"]),
        ({"LLAMA_API_KEY": "l,m"}, ["l", "m"]),
        ({"JAXLLM_API_KEY": "j", "VLLM_API_KEY": "v"}, ["j"]),
        ({"VLLM_API_KEY": "v", "JAXLLM_API_KEY": "j"}, ["j"]),
    ],
)
def test_a_key_of_another_server_is_asked_for(variables: dict[str, str], keys: list[str]) -> None:
    assert comma_separated(read_settings(ServeConfig, {}, environ=variables).api_key) == keys
    assert read_settings(ServeConfig, {"api_key": "flag"}, environ=variables).api_key == "flag"
    assert read_settings(EngineConfig, {}, environ=variables) == EngineConfig()


def test_an_empty_key_of_another_server_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^VLLM_API_KEY is '': it must have at least one entry"):
        read_settings(ServeConfig, {}, environ={"VLLM_API_KEY": ""})


@pytest.mark.parametrize(
    "given", ['["https://a.example", "http://b.example:3000"]', ["https://a.example", "http://b.example:3000"]]
)
def test_origins_and_hosts_may_be_a_list(given: Any) -> None:
    config = read_settings(ServeConfig, {"allowed_origins": given, "allowed_hosts": '["a.example"]'}, environ={})
    assert comma_separated(config.allowed_origins) == ["https://a.example", "http://b.example:3000"]
    assert config.allowed_hosts == "a.example"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[*]", r'it must be separated by commas, or a JSON list such as \["\*"\]'),
        ("a.example", "'a.example' is no origin"),
        ("*, https://a.example/", "'https://a.example/' is no origin"),
        ("https://*.example", r"'https://\*.example' is no origin"),
        ("https://A.example", "'https://A.example' is no origin"),
    ],
)
def test_what_no_browser_sends_as_origin_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--allowed-origins is .*: {said}"):
        read_settings(ServeConfig, {"allowed_origins": given}, environ={})


def test_the_variable_that_forces_an_instruction_set_is_no_setting(cli, served, monkeypatch) -> None:
    monkeypatch.setenv("JAXLLM_CPU_ISA", "avx2")
    assert cli("serve").code == 0
    assert served == [ServeConfig()]


@pytest.mark.parametrize("model", [["org/model"], ["--model", "org/model"], ["--model=org/model"]])
def test_the_model_is_a_bare_argument_or_a_flag(cli, served, model: list[str]) -> None:
    assert cli("serve", *model, "--tensor-parallel-size", "3").code == 0
    assert (served[0].model, served[0].tensor_parallel_size) == ("org/model", 3)


def test_serve_without_arguments_serves_the_defaults(cli, served) -> None:
    assert cli("serve").code == 0
    assert served == [ServeConfig()]


SAMPLES: dict[str, Any] = {
    "model": "m", "tokenizer": "t", "revision": "main", "download_dir": "/d", "load_format": "gguf", "dtype": "float32",
    "decode_buckets": "2,4", "prefill_buckets": "32",
    "seed": 7, "skip_tokenizer_init": True, "max_model_len": 100, "max_num_seqs": 5, "max_num_batched_tokens": 64,
    "dequantize": True, "isq": "q4k", "isq_map": "*.v.weight=q6k,*.o.weight=none", "imatrix": "/i.dat",
    "kv_cache_dtype": "fp8", "max_num_waiting": 9, "decode_steps": 2, "cpu_kernels": "off",
    "speculative_config": {"num_speculative_tokens": 2, "prompt_lookup_max": 4},
    "enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 5, "lora_modules": "sql=/a,poems=/b",
    "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "multi_process": True, "data_parallel_size": 2,
    "enable_dp_attention": True, "enable_expert_parallel": True, "block_size": 32, "numa_node": "auto",
    "num_experts_offload_per_rank": 4, "num_experts_cached_per_rank": 2,
    "num_processes": 2, "process_id": 1, "coordinator_address": "10.0.0.1:8476", "cluster": "lws",
    "cluster_secret": "s",
    "gpu_memory_utilization": 0.5,
    "state_cache_memory": "1MiB",
    "kv_cache_memory": "2MiB", "enable_prefix_caching": False, "attention_backend": "reference", "enforce_eager": True,
    "kv_offload_memory": "3MiB", "kv_offload_dir": "/kv", "kv_offload_disk": "4MiB",
    "kv_transfer_config": {"kv_role": "kv_both", "kv_port": 0}, "kv_events_config": {"topic": "kv"},
    "executables": "/e",
    "compile_cache_dir": "/c", "engine_process": False, "host": "0.0.0.0", "port": 0, "api_key": "k",
    "api_key_file": "/keys.yaml",
    "rate_limit_store": "redis://localhost:6379/1",
    "audit_log": "/audit.jsonl", "ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem", "ssl_ca_certs": "/ca.pem",
    "ssl_cert_reqs": 2,
    "served_model_name": "s", "chat_template": "/x.jinja", "allowed_origins": "*", "allowed_hosts": "*",
    "web": False, "max_body_size": "1MB", "max_body_memory": "9MB", "sse_keep_alive": 2.5,
    "send_timeout": 3.5, "shutdown_timeout": 0.0, "lameduck": 2.0,
    "log_level": "debug",
    "enable_request_logging": True, "log_format": "json", "log_prompts": True,
    "monitor_port": 9090, "monitor_host": "::1",
    "otlp_traces_endpoint": "http://x:4318/v1/traces", "otlp_metrics_endpoint": "http://x:4318/v1/metrics",
    "vllm_metrics": True, "pooling": "mean", "score_method": "cosine", "data_dir": "/data", "store_retention": 86400.0,
    "database_url": "sqlite+aiosqlite:////data/x.db", "max_file_size": "3MB", "max_batch_concurrency": 3,
    "unknown_fields": "warn", "tool_call_parser": "hermes", "reasoning_parser": "none",
    "uds": "/run/x.sock", "root_path": "/llm", "chat_template_content_format": "openai",
    "default_chat_template_kwargs": {"enable_thinking": False}, "hf_overrides": {"a": {"b": 1}}, "quantization": "awq",
    "generation_config": "vllm", "override_generation_config": {"top_p": 0.5}, "max_logprobs": 5,
    "mcp_config": "/mcp.json", "mcp_inject": True, "mcp_result_limit": 500, "mcp_max_turns": 3, "mcp_max_calls": 4,
    "allow_mcp_urls": True,
    "models": "/models.yaml", "model_directory": "/models", "preload_model": "a", "max_loaded_models": 3,
    "model_ttl": 60.0,
    "model_min_seconds": 30.0,
    "model_memory": "1GiB",
    "ray": True, "num_replicas": 3, "prefix_affinity": True, "replica_options": {"max_ongoing_requests": 9},
    "serve_any_model_name": True, "enable_force_include_usage": True, "enable_prompt_embeds": True,
    "stream_interval": 4, "logprobs_mode": "raw_logits", "threads": 3, "cpu_products": "bf16",
    "compile_cache_max": "5MiB", "weight_cache_max": "6MiB", "media_cache_memory": "7MiB", "image_min_tokens": 16,
    "image_max_tokens": 64, "limit_mm_per_prompt": {"image": 2}, "allowed_media_domains": "example.com",
    "allowed_local_media_path": "/media",
}  # fmt: skip


NEEDED = {
    **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras"), ("enable_lora",)),
    "log_prompts": ("log_format",), "monitor_host": ("monitor_port",), "rate_limit_store": ("api_key_file",),
    "kv_offload_dir": ("kv_offload_memory",), "kv_offload_disk": ("kv_offload_memory", "kv_offload_dir"),
    "enable_dp_attention": ("data_parallel_size",), "num_experts_cached_per_rank": ("num_experts_offload_per_rank",),
    "kv_transfer_config": ("kv_offload_memory",), "multi_process": ("tensor_parallel_size",),
    **dict.fromkeys(("num_replicas", "prefix_affinity", "replica_options"), ("ray",)),
}  # fmt: skip
"""Settings that change nothing without others."""


@pytest.mark.parametrize("name", list(ServeConfig.model_fields))
def test_every_field_is_a_flag_a_variable_and_a_key(cli, served, yaml_file, monkeypatch, name: str) -> None:
    value = SAMPLES[name]
    needed = {other: SAMPLES[other] for other in NEEDED.get(name, ())}
    for other, sample in needed.items():
        monkeypatch.setenv(f"JAXLLM_{other.upper()}", str(sample))
    expected = ServeConfig(**{name: value}, **needed)
    assert expected != ServeConfig(), "the sample must differ from the default"
    flag = f"--{name.replace('_', '-')}"
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    as_flag = [flag, text] if not isinstance(value, bool) else [flag if value else flag.replace("--", "--no-", 1)]

    assert cli("serve", *as_flag).code == 0
    assert cli("serve", "--config", str(yaml_file(yaml.safe_dump({name: value})))).code == 0
    monkeypatch.setenv(f"JAXLLM_{name.upper()}", text)
    assert cli("serve").code == 0
    assert served == [expected] * 3


@pytest.mark.parametrize("text", ["null", "None"])
def test_null_takes_an_optional_setting_back(cli, served, yaml_file, text: str) -> None:
    path = str(yaml_file("compile_cache_dir: /c\nmax_model_len: 5\n"))
    assert cli("serve", "--config", path, "--compile-cache-dir", text, "--max-model-len", text).code == 0
    assert served[0].compile_cache_dir is None and served[0].max_model_len is None


def test_a_home_directory_is_expanded(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_settings(EngineConfig, {"download_dir": "~/models"}, environ={}).download_dir == Path("/home/me/models")


def test_commands_that_do_not_serve_leave_server_settings_alone(cli, echo, yaml_file, monkeypatch) -> None:
    monkeypatch.setenv("JAXLLM_API_KEY", "k")
    result = cli("generate", "hi", "--raw", "--config", str(yaml_file("model: m\nport: 9000\n")))
    assert (result.code, echo.instances[0].config) == (0, EngineConfig(model="m"))


def test_an_empty_file_sets_nothing(cli, served, yaml_file) -> None:
    assert cli("serve", "--config", str(yaml_file("# only comments\n"))).code == 0
    assert served == [ServeConfig()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_example_configurations_are_valid(path: Path) -> None:
    config = read_settings(ServeConfig, {}, path, environ={})
    assert set(yaml.safe_load(path.read_text())) == config.model_fields_set
    assert config.served_model_name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_no_example_configuration_opens_the_machine_to_others_without_a_key(path: Path) -> None:
    config = read_settings(ServeConfig, {}, path, environ={})
    assert ip_address(config.host).is_loopback or config.api_key


def test_there_are_example_configurations() -> None:
    assert [path.name for path in CONFIGS] == ["gemma3.yaml", "llama3.yaml", "qwen3.yaml", "smollm2.yaml"]


def test_a_rule_about_several_fields_is_said_in_its_own_words() -> None:
    from pydantic import model_validator

    class Strict(EngineConfig):
        @model_validator(mode="after")
        def refuse(self) -> Strict:
            raise ValueError("seed and dtype do not go together")

    with pytest.raises(ConfigError, match=r"^seed and dtype do not go together$"):
        read_settings(Strict, {}, environ={})


@pytest.mark.parametrize("given", ["*.v.weight=q9", "*.v.weight", "a=q6k,a=q4k", {"*.v.weight": "q9"}])
def test_a_map_of_kinds_names_what_is_wrong_with_it(given) -> None:
    with pytest.raises(ConfigError, match=r"^--isq-map is .*(PATTERN=KIND|'q4_0'|set twice)"):
        read_settings(EngineConfig, {"isq_map": given}, environ={})


def test_a_map_of_kinds_is_a_mapping_in_yaml(yaml_file) -> None:
    path = yaml_file('isq_map:\n  "*.v.weight": q6k\n  "*.o.weight": none\n')
    assert read_settings(EngineConfig, {}, path, environ={}) == EngineConfig(isq_map="*.v.weight=q6k, *.o.weight=none")


@pytest.mark.parametrize("name", ["api_key", "served_model_name"])
@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_list_of_names_is_refused(cli, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A key that a variable was to hold and did not would leave the server open."""
    monkeypatch.setenv(f"JAXLLM_{name.upper()}", value)
    result = cli("serve")
    assert result.code == 2 and f"JAXLLM_{name.upper()} is {value!r}: it must have at least one entry" in result.err


@pytest.mark.parametrize("name", NEEDED)
def test_what_would_change_nothing_is_refused(cli, served, name: str) -> None:
    value = SAMPLES[name]
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    outcome = cli("serve", f"--{name.replace('_', '-')}", *([] if value is True else [text]))
    assert outcome.code != 0 and served == []
    assert f"{name} is " in outcome.err and NEEDED[name][-1] in outcome.err
