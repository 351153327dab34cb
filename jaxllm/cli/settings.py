"""The flags of commands: the settings, flags over JAXLLM_* variables over a YAML file over the defaults, and sampling.

Everything here is driven by the fields of the pydantic models in jaxllm/config/ and of SamplingParams: their names
become flags, variables and YAML keys, their docstrings the help, their types the accepted values.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jaxllm.cli.terminal import as_typed
from jaxllm.cli.vllm_flags import REFUSED
from jaxllm.config import CPU_ISA_VARIABLE, EngineConfig, ServeConfig
from jaxllm.config.server import OTHER_KEY_VARIABLES
from jaxllm.config.values import parse_bytes, read_mapping
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams
from jaxllm.wording import did_you_mean, wrong_setting

Config = TypeVar("Config", bound=EngineConfig)

ENV_PREFIX = "JAXLLM_"

_METAVARS = {
    str: "TEXT",
    int: "NUMBER",
    float: "NUMBER",
    Path: "PATH",
    frozenset: "NUMBERS",
    dict: "JSON",
    tuple: "NAME=PATH",
}
"""What a value is called in --help, by the type of its setting; objects are given as JSON."""

SECTIONS = {
    "model": "Model", "dequantize": "Quantization", "max_num_seqs": "Scheduling", "block_size": "Memory",
    "tensor_parallel_size": "Parallelism", "attention_backend": "Execution", "host": "Server",
    "api_key": "Access",
    "served_model_name": "API", "serve_any_model_name": "API", "models": "Several models",
    "mcp_config": "Tool servers", "data_dir": "Storage", "log_level": "Logging", "monitor_port": "Monitoring",
    "ray": "Ray",
}  # fmt: skip
"""Field -> the section of --help and of docs/configuration.md that it and those after it are in; in their order."""


def sections(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Section -> its fields, in order."""
    found: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    title = ""
    for name in schema.model_fields:
        title = SECTIONS.get(name, title)
        found[title].append(name)
    return {title: names for title, names in found.items() if names}


COMMAND_GROUP = Group("Command", sort_key=0)
CONFIG_FLAG = Parameter(help="YAML file whose keys are the settings below.", group=COMMAND_GROUP)
_SETTINGS_GROUPS = {
    name: Group(title, sort_key=2 + at)  # after the command's own flags and those for sampling
    for at, (title, names) in enumerate(sections(ServeConfig).items())
    for name in names
}


def takes_settings(
    schema: type[Config], *, positional_model: bool = True, only: Collection[str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command every field of `schema` as a flag, plus --config.

    The command's first parameter receives the finished configuration; its other parameters stay its own flags.
    With `positional_model` the model may also be given as the first bare argument (and must be, where others that are
    required follow it); `only` limits the flags to some fields, for a command that uses no others.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        config_file = _keyword("config", None, Path | None, CONFIG_FLAG)
        fields = [
            _flag(name, field) for name, field in schema.model_fields.items() if name in (only or schema.model_fields)
        ]
        if positional_model:
            fields[0] = fields[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if positional_model and any(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in own):
            fields[0] = fields[0].replace(default=inspect.Parameter.empty)  # it comes before them: it must be given
        parameters = sorted([fields[0], *own, config_file, *fields[1:]], key=lambda parameter: parameter.kind)
        signature = inspect.Signature(parameters)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            path = given.pop("config", None)
            flags = {name: given.pop(name) for name in schema.model_fields if name in given}
            return command(read_settings(schema, flags, path), **given)

        run.__name__, run.__doc__ = command.__name__, documentation(command)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.takes_all_settings = only is None  # type: ignore[attr-defined]
        return run

    return decorate


def read_settings(
    schema: type[Config],
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    as_flag: Callable[[str], str] = lambda name: f"--{name.replace('_', '-')}",
) -> Config:
    """Merge the sources into a validated `schema`. `as_flag` is how what is in `flags` was written.

    Commands that do not serve take the same file and variables as `jaxllm serve` and leave the server's fields alone.

    Raises:
        ConfigError: a key that does not exist, or a value that its field refuses; the message names the source.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, source: str) -> None:
        if name in schema.model_fields:
            values[name] = _from_text(value, schema.model_fields[name]) if isinstance(value, str) else value
            sources[name] = source

    for key, value in read_yaml(config_file, schema).items():
        take(key, value, f"{config_file}: {key}")
    for variable, name in _known_variables(schema, environ).items():
        take(name, environ[variable], variable)
    for name, value in flags.items():
        take(name, value, as_flag(name))
    try:
        return schema(**values)
    except ValidationError as error:
        first = error.errors()[0]
        accepted = wrong_setting(first)
        if not first["loc"]:  # a rule about several fields at once
            raise ConfigError(accepted) from None
        name, *inside = map(str, first["loc"])
        accepted = f"{'.'.join(inside)}: {accepted}" if inside else accepted
        raise ConfigError(f"{sources[name]} is {values[name]!r}: {accepted}") from None


def names_setting(variable: str) -> bool:
    """Whether an environment variable is to name a setting: all that begin with JAXLLM_ but one, and other keys."""
    return (variable.startswith(ENV_PREFIX) and variable != CPU_ISA_VARIABLE) or variable in OTHER_KEY_VARIABLES


def _known_variables(schema: type[EngineConfig], environ: Mapping[str, str]) -> dict[str, str]:
    """Variable -> field name for every variable of settings that is set; of two for one field the last wins."""
    names = dict.fromkeys([*ServeConfig.model_fields, *schema.model_fields])
    fields = dict.fromkeys(OTHER_KEY_VARIABLES, "api_key") | {f"{ENV_PREFIX}{name.upper()}": name for name in names}
    for variable in filter(names_setting, environ):
        if variable not in fields:
            raise ConfigError(f"unknown variable {variable!r}{did_you_mean(variable, fields)}")
    return {variable: name for variable, name in fields.items() if variable in environ}


def _from_text(text: str, field: FieldInfo) -> Any:
    """'null' -> None where the field may be None, '16' -> 16 where the choices are numbers, '~/x' -> '/home/me/x'."""
    types = _members(field.annotation)
    if text.lower() in ("null", "none") and type(None) in types:
        return None
    if Path in types:
        return in_home(text)
    return next((choice for choice in _choices(field.annotation) if str(choice) == text), text)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Literal["a", "b"] | None -> ("a", "b"); nothing where other values are accepted too."""
    types = [kind for kind in _members(annotation) if kind is not type(None)]
    return get_args(types[0]) if len(types) == 1 and get_origin(types[0]) is Literal else ()


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """One field as cyclopts sees it. All but booleans stay text, so that pydantic alone judges values,
    in the same words whether they came from a flag, a variable or YAML."""
    types = [kind for kind in _members(field.annotation) if kind is not type(None)]
    choices = _choices(field.annotation)
    accepted = f" One of: {', '.join(map(str, choices))}." if choices else ""
    text = f"{field.description}{accepted}"
    if types == [bool]:
        return _keyword(name, field.default, bool | None, Parameter(help=text, group=_SETTINGS_GROUPS[name]))
    kind = get_origin(types[0]) or types[0]
    metavar = "CHOICE" if choices else "SIZE" if _is_size(field) else _METAVARS.get(kind, "JSON")
    default = None if field.default is None else str(field.default)
    return _keyword(name, default, str | None, Parameter(help=text, group=_SETTINGS_GROUPS[name], metavar=metavar))


def _is_size(field: FieldInfo) -> bool:
    """Whether values are numbers of bytes, as 4GiB."""
    return any(getattr(one, "func", None) is parse_bytes for one in _metadata(field.annotation, field.metadata))


def _metadata(annotation: Any, outer: list[Any]) -> list[Any]:
    """What an Annotated, alone or in a union with None, says besides its type."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [*outer, *(one for member in members if get_origin(member) is Annotated for one in get_args(member)[1:])]


def _keyword(name: str, default: Any, annotation: Any, parameter: Parameter) -> inspect.Parameter:
    annotated = Annotated[annotation, parameter]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


def _members(annotation: Any) -> list[Any]:
    """Annotated[int, …] | None -> [int, NoneType]."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]


Of = TypeVar("Of", bound=type | Callable[..., Any])


def documentation(of: type | Callable[..., Any]) -> str:
    """The docstring of a class or a function."""
    return inspect.getdoc(documented(of)) or ""


def documented(of: Of) -> Of:
    """Give a class or a function its docstring back."""
    left_out = sys.flags.optimize >= 2 and not (inspect.isfunction(of) and of.__doc__)
    if left_out:
        definition = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
        assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
        of.__doc__ = ast.get_docstring(definition)
    return of


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


SAMPLING_GROUP = Group(
    "Sampling", sort_key=1, help="A flag wins over the model's own recommendation, and that over the default shown."
)

# Text is what these commands are for; --seed is the engine's own, which unseeded requests draw from; functions of
# logits are given to an engine in Python.
_LEFT_OUT = {"detokenize", "logits_processors", *EngineConfig.model_fields}
_FLAG_TYPES: dict[str, Any] = {
    "stop": list[str] | None,
    "stop_token_ids": list[int] | None,
    "logit_bias": dict[str, float] | None,
}
_DEFAULT_MAX_TOKENS = 512


def takes_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every SamplingParams field as a flag; its second parameter receives those that were given."""
    config, _, *own = inspect.signature(command, eval_str=True).parameters.values()
    flags = sampling_flags()
    signature = inspect.Signature(sorted([config, *own, *flags], key=lambda parameter: parameter.kind))

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sampling = {flag.name: given.pop(flag.name) for flag in flags if flag.name in given}
        return command(given.pop("config"), sampling, **given)

    run.__name__, run.__doc__ = command.__name__, documentation(command)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def sampling_params(given: Mapping[str, Any], model_defaults: SamplingDefaults = SamplingDefaults()) -> SamplingParams:
    """Flags over the checkpoint's generation_config over SamplingParams' own defaults.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    typed = {name: _as_typed(value) for name, value in given.items()}
    return SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **model_defaults.fields(), **typed})


def _as_typed(value: Any) -> Any:
    """The texts of a flag, alone or in a list."""
    if isinstance(value, list):
        return [_as_typed(entry) for entry in value]
    return as_typed(value) if isinstance(value, str) else value


def sampling_flags() -> list[inspect.Parameter]:
    """One keyword parameter a field; a flag that is not given leaves the choice to the model."""
    types = get_type_hints(SamplingParams)
    for member in (member for annotation in types.values() for member in get_args(annotation)):
        if dataclasses.is_dataclass(member):  # its fields become flags as well
            documented(member)  # type: ignore[type-var]
    texts = _field_texts()
    flags = []
    for field in dataclasses.fields(SamplingParams):
        if field.name in _LEFT_OUT:
            continue
        default = _DEFAULT_MAX_TOKENS if field.name == "max_tokens" else field.default
        shown = isinstance(default, bool | int | float)
        parameter = Parameter(
            help=texts[field.name] + (f" [default: {default}]" if shown else ""),
            group=SAMPLING_GROUP,
            negative=None if default is True else (),
            show_default=False,
            validator=_token_ids if field.name == "logit_bias" else None,
        )
        annotation = Annotated[_FLAG_TYPES.get(field.name, types[field.name] | None), parameter]
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return flags


def _token_ids(_: type, logit_bias: dict[str, float] | None) -> None:
    if not all(token.isdigit() for token in logit_bias or ()):
        raise ValueError(
            "it must map token ids to numbers, as in --logit-bias.42 -1.5 or --logit-bias '{\"42\": -1.5}'"
        )


def _field_texts() -> dict[str, str]:
    """The 'Attributes:' of SamplingParams' docstring: 'a, b: text.' -> {'a': 'text.', 'b': 'text.'}."""
    attributes = re.findall(r"^ +([a-z_, ]+): (.+)$", documentation(SamplingParams), flags=re.MULTILINE)
    return {name: text[0].upper() + text[1:] for names, text in attributes for name in names.split(", ")}
