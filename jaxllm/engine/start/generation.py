"""The recommended sampling and the tokens that end a text, as a config has them; nothing here needs JAX."""

from __future__ import annotations

from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.folders import in_home
from jaxllm.weights.fields import check_fields
from jaxllm.weights.folder import EOS_FIELDS, SAMPLING_FIELDS, read_generation_config


def generation_eos(config: EngineConfig) -> list[int]:
    """The tokens that end a text by the generation_config.json of another folder, where one is named."""
    if config.generation_config in ("auto", "vllm"):
        return []
    eos = _read(config.generation_config).get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def with_overrides(config: EngineConfig, of_model: dict[str, Any]) -> dict[str, Any]:
    """Recommended sampling as config has it; the tokens that end a text stay the model's."""
    match config.generation_config:
        case "auto":
            found = of_model
        case "vllm":
            found = {name: value for name, value in of_model.items() if name in EOS_FIELDS}
        case folder:
            found = _read(folder)
    overrides = config.override_generation_config or {}
    if unknown := sorted(overrides.keys() - SAMPLING_FIELDS.keys()):
        raise ConfigError(f"override_generation_config has {unknown[0]!r}; accepted are {', '.join(SAMPLING_FIELDS)}")
    try:
        check_fields(overrides, SAMPLING_FIELDS)
    except CheckpointError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    return found | overrides


def _read(folder: str) -> dict[str, Any]:
    path = in_home(folder)
    if not (path / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config is {folder!r}; it must be auto, vllm, or a folder with a generation_config.json"
        )
    return read_generation_config(path)
