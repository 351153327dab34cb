"""What `--config` names: a YAML file whose keys are settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm.cli.vllm_flags import REFUSED
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.errors import ConfigError
from jaxllm.wording import did_you_mean
from jaxllm.yaml_file import read_mapping


def read_yaml(path: Path | None, schema: type[EngineConfig] = ServeConfig) -> dict[str, Any]:
    """The settings in a file, of a server or of `schema`, whose values are not checked yet; none without a file.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key that is no setting or that it has twice.
    """
    document = {} if path is None else read_mapping(path, "--config", "setting: value")
    known = dict.fromkeys([*ServeConfig.model_fields, *schema.model_fields])
    for key in document:
        if reason := REFUSED.get(f"--{str(key).replace('_', '-')}"):
            raise ConfigError(f"{path}: {key} is not available: {reason}")
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}{did_you_mean(str(key), known)}")
    return document
