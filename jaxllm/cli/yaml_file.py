"""What `--config` names: a YAML file whose keys are settings."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from jaxllm.cli.vllm_flags import REFUSED
from jaxllm.config import ServeConfig, did_you_mean
from jaxllm.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, self.construct_object(key)
            if name in lines:
                raise yaml.YAMLError(f"{name!r} is set in line {lines[name]} and again in line {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path | None) -> dict[str, Any]:
    """The settings in a file, whose values are not checked yet; none without a file.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key that is no setting or that it has twice.
    """
    if path is None:
        return {}
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config is {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}; it must be a mapping of setting: value")
    for key in document:
        if reason := REFUSED.get(f"--{str(key).replace('_', '-')}"):
            raise ConfigError(f"{path}: {key} is not available: {reason}")
        if key not in ServeConfig.model_fields:
            raise ConfigError(f"{path}: unknown setting {key!r}{did_you_mean(str(key), ServeConfig.model_fields)}")
    return document
