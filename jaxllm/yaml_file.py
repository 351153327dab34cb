"""YAML files that hold a mapping, read so that nothing in them is lost unnoticed."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from jaxllm.errors import ConfigError
from jaxllm.wording import kind_of


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


def read_mapping(path: Path, flag: str, holds: str) -> dict[Any, Any]:
    """What a file holds, not checked any further; an empty file is an empty mapping.

    Args:
        flag: what named the file, as --config.
        holds: what the mapping is of, as "setting: value".

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key twice.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds {kind_of(document)}; it must be a mapping of {holds}")
    return document
