"""Flags as vLLM takes them: short names, underscores, lists, objects by their keys, numbers with a unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import ServeConfig
from tests.cli.test_errors import check


def test_short_and_other_names(cli, served) -> None:
    assert cli("serve", "m", "-tp", "2", "-q=awq", "--enable-log-requests", "--max_model_len", "64").code == 0
    assert served == [
        ServeConfig(
            model="m", tensor_parallel_size=2, quantization="awq", enable_request_logging=True, max_model_len=64
        )
    ]


ADAPTERS = {"sql": "/adapters/sql", "poems": "org/poems"}
OBJECT = '{"name": "poems", "path": "org/poems", "base_model_name": "m"}'


@pytest.mark.parametrize(
    "given",
    [
        ["--lora-modules", "sql=/adapters/sql", "poems=org/poems"],
        ["--lora_modules", "sql=/adapters/sql, poems=org/poems"],
        ["--lora-modules", "sql=/adapters/sql", OBJECT],
        ["--lora-modules", '[{"name": "sql", "path": "/adapters/sql"}, "poems=org/poems"]'],
    ],
)
def test_adapters_are_given_as_vllm_takes_them(cli, served, given: list[str]) -> None:
    assert cli("serve", "m", "--enable-lora", *given, "--max-loras", "2").code == 0
    [config] = served
    assert {module.name: module.path for module in config.lora_modules} == ADAPTERS
    assert (config.enable_lora, config.max_loras) == (True, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sql", "it must be NAME=PATH, several separated by commas"),
        ("sql=", "it must be NAME=PATH, several separated by commas"),
        ("a=x,a=y", "'a' is there twice; each needs a name of its own"),
        ("[1", "it must be NAME=PATH, or JSON such as"),
        ('{"name": "a"}', "0.path: it must be given"),
        ('{"name": "a", "path": "x", "rank": 3}', "0.rank: there is no such key"),
        ('{"name": "a,b", "path": "x"}', "0.name: it must be printable characters"),
    ],
)
def test_adapters_have_names_and_paths(cli, served, given: str, said: str) -> None:
    check(cli("serve", "m", "--lora-modules", given), f"--lora-modules is {given!r}: {said}")
    assert not served


def test_adapters_are_not_served_by_a_server_without(cli, served) -> None:
    check(
        cli("serve", "m", "--lora-modules", "a=x", "--no-enable-lora"),
        "lora_modules is set, and enable_lora is false: adapters need it",
    )


@pytest.mark.parametrize(
    ("given", "length"), [("128k", 128_000), ("128K", 131_072), ("25.6k", 25_600), ("auto", None), ("-1", None)]
)
def test_a_length_may_have_a_unit(cli, served, given: str, length: int | None) -> None:
    assert cli("serve", "m", "--max-model-len", given).code == 0
    assert served == [ServeConfig(model="m", max_model_len=length)]
    assert ServeConfig(model="m", max_model_len=given) == served[0]


@pytest.mark.parametrize(
    ("names", "dtype"), [("half fp16 f16", "float16"), ("bf16", "bfloat16"), ("float fp32 f32", "float32")]
)
def test_types_of_numbers_by_other_names(cli, served, names: str, dtype: str) -> None:
    for name in names.split():
        assert cli("serve", "m", "--dtype", name).code == 0
    assert {config.dtype for config in served} == {dtype}


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3"],
        ["-sc.method", "ngram", "--speculative_config.num_speculative_tokens", "3"],
        ["--spec-method", "ngram", "--spec-tokens", "3"],
        ["-sc", '{"method": "mtp", "num_speculative_tokens": 3}', "--spec-method=ngram"],
    ],
)
def test_an_object_may_be_given_by_its_keys(cli, served, given: list[str]) -> None:
    assert cli("serve", "m", *given).code == 0
    assert served == [ServeConfig(model="m", speculative_config=DRAFTS)]


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (["m", "--served-model-name", "a", "b", "--port", "1"], {"served_model_name": "a,b", "port": 1}),
        (["--served-model-name", "a", "m"], {"served_model_name": "a"}),
        (["m", "--api-key", "x", "y"], {"api_key": "x,y"}),
        (["m", "--rope-scaling", '{"rope_type": "yarn"}', "--rope-theta", "5e5"],
         {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}}),
        (["m", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"],
         {"num_processes": 2, "process_id": 1, "coordinator_address": "10.0.0.1:29501"}),
        (["m", "--kv-offloading-size", "8"], {"kv_offload_memory": "8GiB"}),
        (["m", "--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "FLASHINFER"], {"kv_cache_dtype": "fp8"}),
        (["m", "--compilation-config", "{}", "-O3", "-cc.mode", "none", "--cudagraph-capture-sizes", "1", "2"], {}),
        (["m", "--limit-mm-per-prompt.image", "4", "--no-enable-chunked-prefill", "--trust-remote-code"],
         {"limit_mm_per_prompt": {"image": 4}}),
        (["m", "--allowed-media-domains", "a.example", "b.example", "--allowed-local-media-path", "/a"],
         {"allowed_media_domains": "a.example,b.example", "allowed_local_media_path": Path("/a")}),
        (["m", "-sc", '{"num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'],
         {"speculative_config": {"num_speculative_tokens": 3}}),
        (["m", "--block-size", "256", "--load-format", "fastsafetensors"], {}),
        (["--port", "1", "--served-model-name", "a", "m"], {"served_model_name": "a", "port": 1}),
        (["m", "--no-enable-log-requests"], {"enable_request_logging": False}),
        (["m", "--hf-overrides.a+", "x", "--hf-overrides.a+", "y"], {"hf_overrides": {"a": ["x", "y"]}}),
    ],
)  # fmt: skip
def test_a_flag_of_vllm_is_a_setting_here(cli, served, given: list[str], settings: dict[str, Any]) -> None:
    assert cli("serve", *given).code == 0
    assert served == [ServeConfig(model="m", **settings)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--enable-chunked-prefill=false"], "--enable-chunked-prefill is 'false'; it takes no value"),
        (["--cpu-offload-gb", "4"], "--cpu-offload-gb is not available: weights stay on the devices"),
        (["--max-num-queued-reqs"], "--max-num-queued-reqs requires an argument"),
        (
            ["--response-role", "robot"],
            "--response-role is 'robot': answers are always the assistant's; accepted is as",
        ),
        (["-dcp", "4"], "-dcp is '4': accepted is 1"),
        (["--spec-tokens", "3", "-sc", "[1]"], "--speculative-config is '[1]': it must be a JSON object"),
        (["--device", "hpu"], "--device is 'hpu': accepted are cpu, auto, cuda, gpu, tpu"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "--hf-overrides.a.b is '2': a part of it has another"),
        (["--hf-overrides.a", "x", "--hf-overrides.a+", "y"], "--hf-overrides.a+ is 'y': a part of it has another"),
        (["--hf-overrides..a", "1"], "Unknown option: --hf-overrides..a"),
        (["-tp.x", "1"], "-tp has no key 'x': it is no object"),
        (["--rope-scaling", "yarn"], "--rope-scaling is 'yarn': it must be a JSON object"),
        (["--master-port", "3"], "--master-port is '3': it needs --master-addr"),
        (["--no-max-num-queued-reqs"], "Unknown option: --no-max-num-queued-reqs"),
        (["--kv-offloading-size", "-3"], "--kv-offload-memory is '-3GiB': it must be above 0"),
        (["--top-k", "inf"], "--top-k is 'inf': accepted is a number"),
        (["--rope-freq-scale", "nan"], "--rope-freq-scale is 'nan': accepted is a number"),
        (["--d", ","], "--d is ',': accepted are numbers of devices, as 0,1"),
        (["--uds="], "--uds is '': it must be a path"),
        (["--host="], "--host is '': it must have at least 1 character"),
        (["--numa-node", "x"], "--numa-node is 'x': it must be a whole number from 0 on, or auto"),
        (["--hf-overrides", "[" * 9999], f"--hf-overrides is '{'[' * 98}…: it must be a JSON object"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cli, served, given: list[str], said: str) -> None:
    check(cli("serve", "m", *given), said)
    assert not served


def test_a_key_of_a_file_that_has_another_name_here_is_told(cli, tmp_path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(json.dumps({"max-num-queued-reqs": 3}))
    check(cli("serve", "m", "--config", str(path)), "max-num-queued-reqs of vLLM is not available: max-num-waiting is")
