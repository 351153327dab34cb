"""candle-vllm's models.yaml is read by --models: what has a counterpart is honoured, the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.catalog import CatalogEntry, read_catalog

EXAMPLE = Path(__file__).parents[2] / "examples" / "candle_vllm_models.yaml"


def read(folder: Path, document: Any, **settings: Any) -> list[CatalogEntry]:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return read_catalog(ServeConfig(models=path, **settings))


def one(folder: Path, **fields: Any) -> CatalogEntry:
    [entry] = read(folder, {"models": [{"name": "a", "hf_id": "org/a"} | fields]})
    return entry


def test_each_source_is_found(tmp_path: Path) -> None:
    models = [
        {"name": "hub", "hf_id": "org/a", "notes": "as it is"},
        {"name": "file of the hub", "hf_id": "org/a", "weight_file": "a-Q4_K_M.gguf"},
        {"name": "folder", "local_path": "./models/a"},
        {"name": "file", "local_path": "/models", "weight_file": "a.gguf"},
    ]
    assert {entry.name: entry.model for entry in read(tmp_path, {"models": models})} == {
        "hub": "org/a",
        "file of the hub": "org/a:a-Q4_K_M.gguf",
        "folder": "./models/a",
        "file": "/models/a.gguf",
    }


def test_params_become_settings(tmp_path: Path) -> None:
    params = {
        "dtype": "f16",
        "isq": "q4k",
        "block_size": 64,
        "max_num_seqs": 8,
        "kvcache_mem_gpu": 4096,
        "prefill_chunk_size": 1024,
        "device_ids": [0, 1],
        "multithread": False,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": -1,
        "frequency_penalty": 0.0,
        "presence_penalty": None,
    }
    entry = one(tmp_path, params=params, capabilities={"vision_mode": "disabled"})
    assert (entry.dtype, entry.isq, entry.block_size, entry.max_num_seqs) == ("float16", "q4k", 64, 8)
    assert (entry.kv_cache_memory, entry.max_num_batched_tokens, entry.tensor_parallel_size) == (4 * 2**30, 1024, 2)
    assert entry.override_generation_config == {"temperature": 0.3, "top_p": 0.9, "top_k": -1}


def test_what_holds_for_all_models(tmp_path: Path) -> None:
    document = {
        "idle_unload_secs": 600,
        "default_model": "b",
        "global_params": {"dtype": "bf16"},
        "parking_lot": {"limits": {"max_queue_depth": 100}},
        "models": [
            {"name": "a", "hf_id": "org/a", "params": {"dtype": "f32", "quantization": "q8_0"}},
            {"name": "b", "hf_id": "org/b", "parking_lot": {"limits": {"max_queue_depth": 5}}},
        ],
    }
    second, first = read(tmp_path, document, max_model_len=64)
    assert (first.name, first.dtype, first.isq, first.ttl, first.max_num_waiting) == ("a", "bfloat16", "q8_0", 600, 100)
    assert (second.name, second.ttl, second.max_num_waiting, second.max_model_len) == ("b", 600, 5, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "org/b"}, r"models\[0\]: unknown key 'model' in a file of candle-vllm's"),
        ({"weigth_file": "a.gguf", "notes": ""}, "unknown key 'weigth_file' .*; did you mean 'weight_file'"),
        ({"local_path": "/m"}, "it must have either hf_id or local_path"),
        ({"hf_id": None, "notes": ""}, "it must have either hf_id or local_path"),
        ({"hf_id": 5}, "hf_id is 5; it must be a string"),
        ({"weight_file": "model.safetensors"}, "weight_file is 'model.safetensors'; it must be a .gguf file"),
        ({"params": {"dtyp": "f16"}}, "params: unknown key 'dtyp'"),
        ({"params": {"dtype": "f8"}}, "params.dtype is 'f8': dtype is 'f8': it must be"),
        ({"params": {"max_num_seqs": 0}}, "params.max_num_seqs is 0: max_num_seqs is 0: it must be 1 or more"),
        ({"params": {"prefill_chunk_size": 8}}, "prefill_chunk_size is 8: max_num_batched_tokens is 8: it must be 16"),
        ({"params": {"mem": "4GB"}}, "params.mem is '4GB'; it must be a whole number of megabytes"),
        ({"params": {"mem": 512, "kvcache_mem_cpu": 512}}, "kvcache_mem_cpu is 512, and mem is given too"),
        ({"params": {"device_ids": [1]}}, r"device_ids is \[1\]; it must count devices from 0"),
        ({"params": {"device_ids": []}}, r"device_ids is \[\]; it must count devices from 0"),
        ({"params": {"frequency_penalty": 0.5}}, "frequency_penalty is 0.5; a server has no default for it"),
        ({"params": [1]}, r"params is \[1\]; it must be a mapping"),
        ({"capabilities": {"vision_mode": "proxy"}}, "models are served for text only"),
        ({"parking_lot": {"limits": {"timeout_secs": 5}}}, "parking_lot.limits.timeout_secs has no counterpart here"),
        ({"parking_lot": {"pool": {}}}, "parking_lot.pool has no counterpart here"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        one(tmp_path, **fields)
    assert "\n" not in str(raised.value)


def test_wrong_keys_of_the_file_are_refused_by_name(tmp_path: Path) -> None:
    models = [{"name": "a", "hf_id": "org/a"}]
    for document, message in (
        ({"models": models, "mailbox": {}}, "unknown key 'mailbox' in a file of candle-vllm's"),
        ({"models": models, "default_model": "b"}, "default_model is 'b'; it must be one of a"),
        ({"models": [{"hf_id": "org/a"}]}, "name is None; it must be a string"),
        ({"models": [*models, "b"], "notes": 1}, "unknown key 'notes'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path, document)


def test_a_list_of_ours_is_still_ours(tmp_path: Path) -> None:
    [entry] = read(tmp_path, {"models": [{"name": "a", "model": "org/a", "max_num_seqs": 4}]})
    assert (entry.model, entry.max_num_seqs) == ("org/a", 4)


def test_the_example_is_read() -> None:
    first, second = read_catalog(ServeConfig(models=EXAMPLE))
    assert (first.name, first.model) == ("qwen3", "Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf")
    assert (second.name, second.isq, second.ttl) == ("mistral-7b", "q4k", 3600)
