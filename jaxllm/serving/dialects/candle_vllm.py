"""candle-vllm's models.yaml, as entries of a catalog of ours: https://github.com/EricLBuehler/candle-vllm."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import ModelConfig, make_config
from jaxllm.errors import ConfigError
from jaxllm.wording import did_you_mean

logger = logging.getLogger(__name__)

FoundModel = tuple[str, dict[str, Any]]
"""The place of a model in the file, and its settings by our names."""

TOP = ("models", "default_model", "idle_unload_secs", "global_params", "parking_lot")
FIELDS = ("name", "hf_id", "local_path", "weight_file", "params", "capabilities", "parking_lot", "notes")
PARAMS = {
    "dtype": "dtype", "isq": "isq", "quantization": "isq", "block_size": "block_size", "max_num_seqs": "max_num_seqs",
    "mem": "kv_cache_memory", "kvcache_mem_gpu": "kv_cache_memory", "kvcache_mem_cpu": "kv_cache_memory",
    "prefill_chunk_size": "max_num_batched_tokens", "device_ids": "tensor_parallel_size",
}  # fmt: skip
"""A name under `params` -> the setting that it becomes."""
SAMPLING = ("temperature", "top_p", "top_k")
PENALTIES = ("frequency_penalty", "presence_penalty")


def is_candle_vllm(document: Mapping[Any, Any]) -> bool:
    """Say whether a file has keys that only candle-vllm's have."""
    models = document.get("models")
    if not isinstance(models, list):
        return False
    entries = [fields for fields in models if isinstance(fields, dict)]
    return not {*TOP[1:]}.isdisjoint(document) or any(not {*FIELDS[1:]}.isdisjoint(fields) for fields in entries)


def read_candle_vllm(path: Path, document: Mapping[Any, Any]) -> list[FoundModel]:
    """The models of a file, `default_model` first. Raises ConfigError naming what is unknown, wrong or not honoured."""
    _check_keys(str(path), document, TOP)
    everywhere = _mapping(f"{path}: global_params", document.get("global_params"))
    waiting = _waiting(f"{path}: parking_lot", document.get("parking_lot"))
    shared = waiting | ({"ttl": document["idle_unload_secs"]} if "idle_unload_secs" in document else {})
    models = document.get("models", [])
    found = [_entry(f"{path}: models[{at}]", fields, everywhere, shared) for at, fields in enumerate(models)]
    default = document.get("default_model")
    names = [entry["name"] for _, entry in found]
    if default is not None and default not in names:
        raise ConfigError(f"{path}: default_model is {default!r}; it must be one of {', '.join(names)}")
    return sorted(found, key=lambda one: default is not None and one[1]["name"] != default)


def _entry(where: str, fields: Any, everywhere: Mapping[str, Any], shared: Mapping[str, Any]) -> FoundModel:
    fields = _mapping(where, fields)
    _check_keys(where, fields, FIELDS)
    name = _string(where, fields, "name", required=True)
    vision = _mapping(f"{where}: capabilities", fields.get("capabilities"))
    if vision.keys() - {"vision_mode"} or vision.get("vision_mode", "disabled") != "disabled":
        raise ConfigError(f"{where}: capabilities is {dict(vision)!r}; models are served for text only: leave it out")
    params = _mapping(f"{where}: params", fields.get("params")) | dict(everywhere)
    waiting = _waiting(f"{where}: parking_lot", fields.get("parking_lot"))
    return where, {"name": name, "model": _source(where, fields), **shared, **waiting, **_settings(where, params)}


def _source(where: str, fields: Mapping[str, Any]) -> str:
    hub, local, file = (_string(where, fields, key) for key in ("hf_id", "local_path", "weight_file"))
    if (hub is None) == (local is None):
        raise ConfigError(f"{where}: it must have either hf_id or local_path")
    if file is not None and not file.endswith(".gguf"):
        raise ConfigError(
            f"{where}: weight_file is {file!r}; it must be a .gguf file: of safetensors the whole folder is read"
        )
    if hub is not None:
        return hub if file is None else f"{hub}:{file}"
    return str(local) if file is None else str(Path(str(local)) / file)


def _settings(where: str, params: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys(f"{where}: params", params, (*PARAMS, *SAMPLING, *PENALTIES, "multithread"))
    given = {key: value for key, value in params.items() if value is not None}
    sampling = {key: given.pop(key) for key in SAMPLING if key in given}
    settings: dict[str, Any] = {"override_generation_config": sampling} if sampling else {}
    origins: dict[str, str] = {}
    for key, value in given.items():
        at = f"{where}: params.{key} is {value!r}"
        if key == "multithread":
            logger.info("%s: it changes nothing, one process has all devices of a model", at)
        elif key in PENALTIES and value != 0:
            raise ConfigError(f"{at}; a server has no default for it: leave it out, and let requests send {key}")
        elif key in PARAMS:
            setting = PARAMS[key]
            if setting in origins:
                raise ConfigError(f"{at}, and {origins[setting]} is given too; leave one of them out")
            origins[setting] = key
            settings[setting] = _value(at, key, value)
            try:
                make_config(ModelConfig, **{setting: settings[setting]})
            except ConfigError as error:
                raise ConfigError(f"{at}: {error}") from None
    return settings


def _value(at: str, key: str, value: Any) -> Any:
    if key == "device_ids":
        if not isinstance(value, list) or not value or value != list(range(len(value))):
            others = "CUDA_VISIBLE_DEVICES chooses others, and JAX_PLATFORMS=cpu the CPU"
            raise ConfigError(f"{at}; it must count devices from 0, as [0, 1]: {others}")
        return len(value)
    if PARAMS[key] == "kv_cache_memory":
        if type(value) is not int:
            raise ConfigError(f"{at}; it must be a whole number of megabytes")
        return value * 2**20
    return value


def _waiting(where: str, value: Any) -> dict[str, Any]:
    """The one setting of candle-vllm's scheduler that ours has too."""
    lot = dict(_mapping(where, value))
    limits = {f"limits.{key}": one for key, one in _mapping(f"{where}.limits", lot.pop("limits", None)).items()}
    for key in [*lot, *limits]:
        if key != "limits.max_queue_depth":
            raise ConfigError(
                f"{where}.{key} has no counterpart here: leave it out. Of parking_lot only limits.max_queue_depth is "
                "read, as max_num_waiting"
            )
    return {"max_num_waiting": limits["limits.max_queue_depth"]} if limits else {}


def _string(where: str, fields: Mapping[str, Any], key: str, *, required: bool = False) -> str | None:
    value = fields.get(key)
    if not isinstance(value, str) and (required or value is not None):
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a string")
    return value


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}; it must be a mapping")
    return value


def _check_keys(where: str, given: Mapping[Any, Any], known: Mapping[str, Any] | Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r} in a file of candle-vllm's{did_you_mean(str(key), known)}")
