"""Settings from flags, then JAXLLM_* variables, a YAML file, the defaults; and vLLM's flags in our words."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxllm.config import CPU_ISA_VARIABLE, EngineConfig, ServeConfig
from jaxllm.config.server import OTHER_KEY_VARIABLES
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.wording import did_you_mean, kind_of, wrong_setting

Config = TypeVar("Config", bound=EngineConfig)
logger = logging.getLogger(__name__)

ENV_PREFIX = "JAXLLM_"


def read_settings(
    schema: type[Config],
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    as_flag: Callable[[str], str] = lambda name: f"--{name.replace('_', '-')}",
) -> Config:
    """Merge the sources into a validated `schema`; fields of other commands in file and variables are left alone.

    `as_flag` is how `flags` were written. Raises ConfigError, naming the source, for an unknown key or a refused value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, source: str) -> None:
        if name in schema.model_fields:
            values[name] = _from_text(value, schema.model_fields[name]) if isinstance(value, str) else value
            sources[name] = source

    for key, value in ({} if config_file is None else _read_yaml(config_file)).items():
        take(key, value, f"{config_file}: {key}")
    for variable, name in _known_variables(environ).items():
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
        raise ConfigError(f"{sources[name]} is {values[name]!r}: {where}{wrong_setting(first)}") from None


def names_setting(variable: str) -> bool:
    """Whether an environment variable is to name a setting: all that begin with JAXLLM_ but one, and other keys."""
    return (variable.startswith(ENV_PREFIX) and variable != CPU_ISA_VARIABLE) or variable in OTHER_KEY_VARIABLES


def _known_variables(environ: Mapping[str, str]) -> dict[str, str]:
    fields = dict.fromkeys(OTHER_KEY_VARIABLES, "api_key")
    fields |= {f"{ENV_PREFIX}{name.upper()}": name for name in ServeConfig.model_fields}
    for variable in filter(names_setting, environ):
        if variable not in fields:
            raise ConfigError(f"unknown variable {variable!r}{did_you_mean(variable, fields)}")
    return {variable: name for variable, name in fields.items() if variable in environ}


def _from_text(text: str, field: FieldInfo) -> Any:
    """'null' -> None where the field may be None, '16' -> 16 where the choices are numbers, '~/x' -> '/home/me/x'."""
    types = members(field.annotation)
    if text.lower() in ("null", "none") and type(None) in types:
        return None
    if Path in types:
        return in_home(text)
    return next((choice for choice in choices(field.annotation) if str(choice) == text), text)


def choices(annotation: Any) -> tuple[Any, ...]:
    """Literal["a", "b"] | None -> ("a", "b"); nothing where other values are accepted too."""
    types = [kind for kind in members(annotation) if kind is not type(None)]
    return get_args(types[0]) if len(types) == 1 and get_origin(types[0]) is Literal else ()


def members(annotation: Any) -> list[Any]:
    """Annotated[int, …] | None -> [int, NoneType]."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]


def _read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, whose values are not checked yet. Raises ConfigError."""
    document = read_mapping(path, "--config", "setting: value")
    for key in document:
        if reason := REFUSED.get(f"--{str(key).replace('_', '-')}"):
            raise ConfigError(f"{path}: {key} is not available: {reason}")
        if key not in ServeConfig.model_fields:
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


RENAMED: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization", "-ep": "--enable-expert-parallel", "--nnodes": "--num-processes",
    "--node-rank": "--process-id", "--enable-log-requests": "--enable-request-logging",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
}  # fmt: skip
"""By the name here. Most flags have vLLM's name, and are not listed."""

ALWAYS_SO: Mapping[str, str] = {
    "--enable-auto-tool-choice": "the model always chooses where the request lets it; see --tool-call-parser",
    "--headless": "of several processes only the first answers requests; see --process-id",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--async-scheduling": "the next step is always dispatched before the last one is read",
    "--disable-log-requests": "requests are logged with --enable-request-logging or --log-format json only",
    "--no-enable-log-requests": "requests are logged with --enable-request-logging or --log-format json only",
    "--disable-log-stats": "statistics are never logged; /metrics has them",
    "--disable-uvicorn-access-log": "requests are logged with --enable-request-logging or --log-format json only",
    "--enable-prompt-tokens-details": "usage always has cached_tokens",
    "--enable-request-id-headers": "responses always have X-Request-Id",
    "--enable-server-load-tracking": "/load always counts",
    "--enable-sleep-mode": "/sleep always puts a model to sleep",
}
"""Switches, and what is so without them."""

_REFUSED = {
    "it would run code that came with a model or from a file": "--trust-remote-code --tool-parser-plugin "
    "--reasoning-parser-plugin --logits-processors --middleware --worker-cls --worker-extension-cls",
    "see --kv-offload-memory, bytes for pages that have lost their place, and --kv-offload-dir":
    "--swap-space --kv-offloading-size --kv-offloading-backend",
    "weights stay on the devices; see --isq for smaller ones": "--cpu-offload-gb",
    "see --kv-cache-memory": "--num-gpu-blocks-override",
    "steps are compiled by XLA; see --enforce-eager, --decode-buckets and --prefill-buckets":
    "--max-seq-len-to-capture --cuda-graph-sizes --compilation-config -O",
    "see --multi-process for a process for each GPU of a machine, docs/scale.md for several machines, and --ray":
    "--distributed-executor-backend",
    "mpirun, Slurm or Kubernetes start the processes: see docs/scale.md and --coordinator-address":
    "--master-addr --master-port",
    "one process answers all requests": "--api-server-count",
    "see --no-engine-process": "--disable-frontend-multiprocessing",
    "JAX chooses it; the environment variable JAX_PLATFORMS names another": "--device",
    "it is read from the checkpoint": "--task --runner --convert --model-impl --tokenizer-mode --config-format",
    "see --hf-overrides": "--hf-config-path",
    "see --pooling": "--override-pooler-config --pooler-config",
    "scales of KV pages are computed as they are written; see --kv-cache-dtype": "--calculate-kv-scales",
    "adapters are small, and whole on each device where their layer's inputs are": "--fully-sharded-loras",
    "adapters are kept in the model's type; see --dtype": "--lora-dtype",
    "models are served for text only": "--enable-tower-connector-lora --limit-mm-per-prompt "
    "--allowed-local-media-path --mm-processor-kwargs --interleave-mm-strings",
    "requests run by their field priority, and in their order where it is the same": "--scheduling-policy",
    "grammars are always llguidance's": "--guided-decoding-backend --structured-outputs-config",
    "it is a field of requests": "--return-tokens-as-token-ids",
    "answers are always the assistant's": "--response-role",
    "TLS 1.2 and 1.3 with the ciphers that Python recommends": "--ssl-ciphers",
    "SIGHUP has the certificate read again": "--enable-ssl-refresh",
    "traces always have each phase; see --otlp-traces-endpoint": "--collect-detailed-traces",
    "see --log-level": "--uvicorn-log-level",
    "prompts are logged whole or not at all; see --log-prompts": "--max-log-len",
    "see --log-prompts, which logs prompts and answers": "--enable-log-outputs",
    "/docs is always there; it tells nothing that the documentation does not": "--disable-fastapi-docs",
}  # fmt: skip
REFUSED: Mapping[str, str] = {flag: reason for reason, flags in _REFUSED.items() for flag in flags.split()}


def translated(arguments: Sequence[str]) -> list[str]:
    """A command line in our own words. Raises ConfigError for a flag that cannot be honoured."""
    found: list[str] = []
    arguments = _with_modules_joined(arguments)
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[at:]]
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name  # vLLM takes both
        if name in REFUSED:
            raise ConfigError(f"{name} is not available: {REFUSED[name]}")
        if name not in ALWAYS_SO:
            found.append(f"{RENAMED.get(name, name)}{equals}{value}")
        elif equals:
            raise ConfigError(f"{name} is {value!r}; it takes no value")
        else:
            logger.warning("%s has no effect: %s", name, ALWAYS_SO[name])
    return found


def _with_modules_joined(arguments: Sequence[str]) -> list[str]:
    """`--lora-modules a=x b=y` -> `--lora-modules ["a=x", "b=y"]`: all that follow and look like a module."""
    found: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        found.append(argument)
        if argument == "--":
            return found + left
        if argument.replace("_", "-") != "--lora-modules":
            continue
        modules = []
        while left and not left[0].startswith("-") and ("=" in left[0] or left[0].startswith("{")):
            modules.append(left.pop(0))
        found += modules if len(modules) < 2 else [json.dumps(modules)]
    return found
