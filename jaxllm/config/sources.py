"""Settings from flags, then JAXLLM_* variables, those of other servers, a YAML file, the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxllm.config import CPU_ISA_VARIABLE, EngineConfig, ServeConfig
from jaxllm.config.others import by_name
from jaxllm.config.server import FOR_SEVERAL_MODELS, OTHER_KEY_VARIABLES, SEVERAL_MODELS
from jaxllm.config.translation import OBJECTS, OTHER_PREFIXES, as_settings, flag, other_variables
from jaxllm.config.values import choices, members, merged, parse_object
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.wording import did_you_mean, kind_of, shown, wrong_setting

Config = TypeVar("Config", bound=EngineConfig)

ENV_PREFIX = "JAXLLM_"


def read_settings(
    schema: type[Config],
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    as_flag: Callable[[str], str] = flag,
) -> Config:
    """Merge the sources into a validated `schema`; fields of other commands in file and variables are left alone.

    `as_flag` is how `flags` were written. Raises ConfigError, naming the source, for an unknown key or a refused value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, source: str) -> None:
        if name in schema.model_fields:
            sources[name] = source
            values[name] = _from_text(value, schema.model_fields[name], source) if isinstance(value, str) else value

    for key, value in ({} if config_file is None else _read_yaml(config_file)).items():
        take(key, value, f"{config_file}: {key}")
    variables = _known_variables(environ)
    others = _of_others(environ) if "host" in schema.model_fields else {}  # a server says which it has found
    given = {*values, *variables.values(), *flags}
    several, file = given & {*SEVERAL_MODELS}, given & {"uds"}
    for name, (value, variable) in others.items():
        if not ((name in FOR_SEVERAL_MODELS and not several) or (name in ("host", "port") and file)):
            take(name, value, variable)
    for variable, name in variables.items():
        take(name, environ[variable], variable)
    for name, value in flags.items():
        take(name, value, as_flag(name))
    try:
        return schema(**values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a rule about several fields at once
            raise ConfigError(wrong_setting(first)) from None
        name, *inside = map(str, first["loc"])
        where = f"{'.'.join(inside)}: " if inside else ""
        raise ConfigError(f"{sources[name]} is {shown(values[name])}: {where}{wrong_setting(first)}") from None


def names_setting(variable: str) -> bool:
    """Whether an environment variable may be a setting: all that begin with JAXLLM_ but one, and other servers'."""
    return _is_ours(variable) or variable in OTHER_KEY_VARIABLES or variable.startswith(OTHER_PREFIXES)


def _is_ours(variable: str) -> bool:
    return variable.startswith(ENV_PREFIX) and variable != CPU_ISA_VARIABLE


def _known_variables(environ: Mapping[str, str]) -> dict[str, str]:
    fields = dict.fromkeys(OTHER_KEY_VARIABLES, "api_key")
    fields |= {f"{ENV_PREFIX}{name.upper()}": name for name in ServeConfig.model_fields}
    for variable in filter(_is_ours, environ):
        if variable not in fields:
            raise ConfigError(f"unknown variable {variable!r}{did_you_mean(variable, fields)}")
    return {variable: name for variable, name in fields.items() if variable in environ}


def _of_others(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Field -> its value by variables of other servers, and the last of them."""
    found: dict[str, tuple[Any, str]] = {}
    for variable in other_variables(environ):
        for name, value in as_settings(variable.flags).items():
            if flag(name) in OBJECTS:
                try:
                    value = merged(found[name][0] if name in found else {}, parse_object(value))
                except ValueError as error:
                    raise ConfigError(f"{variable.name} is {shown(value)}: {error}") from None
            found[name] = value, variable.name
    return found


def _from_text(text: str, field: FieldInfo, source: str) -> Any:
    """'null' -> None where the field may be None, '16' -> 16 where the choices are numbers, '~/x' -> '/home/me/x'."""
    types = members(field.annotation)
    if text.lower() in ("null", "none") and type(None) in types:
        return None
    if Path in types:
        if not text:
            raise ConfigError(f"{source} is '': it must be a path")
        return in_home(text)
    return next((choice for choice in choices(field.annotation) if str(choice) == text), text)


def _read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, whose values are not checked yet. Raises ConfigError."""
    document = read_mapping(path, "--config", "setting: value")
    for key in document:
        if key not in ServeConfig.model_fields:
            for row in by_name().get(flag(str(key)), ()):
                why = row.why or f"{row.ours.lstrip('-')} is its name here"
                raise ConfigError(f"{path}: {key} of {row.server} is not available: {why}")
            raise ConfigError(f"{path}: unknown setting {key!r}{did_you_mean(str(key), ServeConfig.model_fields)}")
    return document


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
    """A YAML file's mapping of `holds`, such as "setting: value"; an empty file is an empty one.

    Raises ConfigError, naming the `flag`, where it cannot be read, is no mapping, or has a key twice.
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
