"""The flags of commands, from the fields of jaxllm/config/ and of SamplingParams, and what a value must be."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import cyclopts
from cyclopts import Argument, CycloptsError, Group, Parameter, Token
from cyclopts.validators import Number
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxllm.cli.terminal import as_typed
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.config.sources import Config, read_settings
from jaxllm.config.values import Bytes, choices, members
from jaxllm.requests.sampling import SamplingDefaults, SamplingParams

_METAVARS = {
    str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH", frozenset: "NUMBERS", dict: "JSON", tuple: "NAME=PATH",
}  # fmt: skip
"""What a value is called in --help, by the type of its setting; objects are given as JSON."""

SECTIONS = {
    "model": "Model", "dequantize": "Quantization", "max_num_seqs": "Scheduling", "block_size": "Memory",
    "tensor_parallel_size": "Parallelism", "attention_backend": "Execution", "host": "Server", "api_key": "Access",
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
Json = Annotated[bool, Parameter(name="--json", negative=())]
Switch = Annotated[bool, Parameter(negative=())]
CONFIG_FLAG = Parameter(help="YAML file whose keys are the settings below.", group=COMMAND_GROUP)
_SETTINGS_GROUPS = {
    name: Group(title, sort_key=2 + at)  # after the command's own flags and those for sampling
    for at, (title, names) in enumerate(sections(ServeConfig).items())
    for name in names
}


def takes_settings(
    schema: type[Config], *, positional_model: bool = True, only: Collection[str] | None = None, sampling: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command, which may be a coroutine function, every field of `schema`, or those in `only`, as a flag, plus
    --config.

    The command's first parameter receives the finished configuration; its other parameters stay its own flags. With
    `positional_model` the model may also be given as the first bare argument. With `sampling` the fields of
    SamplingParams are flags too; the parameter of that name receives those that were given.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        own = [_of_command(parameter) for parameter in others if parameter.name != "sampling"]
        sampled = sampling_flags() if sampling else []
        config_file = _keyword("config", None, Path | None, CONFIG_FLAG)
        fields = [_flag(name, field) for name, field in schema.model_fields.items() if only is None or name in only]
        if positional_model:
            fields[0] = fields[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if positional_model and any(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in own):
            fields[0] = fields[0].replace(default=inspect.Parameter.empty)  # it comes before them: it must be given
        parameters = [fields[0], *own, config_file, *fields[1:], *sampled]
        signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            path = given.pop("config", None)
            flags = {name: given.pop(name) for name in schema.model_fields if name in given}
            if sampling:
                given["sampling"] = {flag.name: given.pop(flag.name) for flag in sampled if flag.name in given}
            result = command(read_settings(schema, flags, path), **given)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        run.__name__, run.__doc__ = command.__name__, documentation(command)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.takes_all_settings = only is None  # type: ignore[attr-defined]
        return run

    return decorate


def _of_command(parameter: inspect.Parameter) -> inspect.Parameter:
    kind = parameter.annotation
    kind, *said = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    return parameter.replace(annotation=Annotated[kind, Parameter(group=COMMAND_GROUP), *said])


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """A field as cyclopts sees it; all but booleans stay text, so that pydantic alone judges values."""
    types = [kind for kind in members(field.annotation) if kind is not type(None)]
    accepted = choices(field.annotation)
    text = f"{field.description} One of: {', '.join(map(str, accepted))}." if accepted else field.description
    if types == [bool]:
        return _keyword(name, field.default, bool | None, Parameter(help=text, group=_SETTINGS_GROUPS[name]))
    inner = [one for member in get_args(field.annotation) for one in getattr(member, "__metadata__", ())]
    is_size = get_args(Bytes)[1] in (*field.metadata, *inner)
    kind = get_origin(types[0]) or types[0]
    metavar = "CHOICE" if accepted else "SIZE" if is_size else _METAVARS.get(kind, "JSON")
    default = None if field.default is None else str(field.default)
    return _keyword(name, default, str | None, Parameter(help=text, group=_SETTINGS_GROUPS[name], metavar=metavar))


def _keyword(name: str, default: Any, annotation: Any, parameter: Parameter) -> inspect.Parameter:
    annotated = Annotated[annotation, parameter]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


Of = TypeVar("Of", bound=type | Callable[..., Any])


def documentation(of: type | Callable[..., Any]) -> str:
    return inspect.getdoc(documented(of)) or ""


def documented(of: Of) -> Of:
    """Give a class or a function its docstring back, which `python -OO` leaves out."""
    if sys.flags.optimize >= 2 and not (inspect.isfunction(of) and of.__doc__):
        definition = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
        assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
        of.__doc__ = ast.get_docstring(definition)
    return of


SAMPLING_GROUP = Group(
    "Sampling", sort_key=1, help="A flag wins over the model's own recommendation, and that over the default shown."
)

# Text is what these commands are for; --seed is the engine's own, which unseeded requests draw from; functions of
# logits are given to an engine in Python.
_LEFT_OUT = {"detokenize", "logits_processors", *EngineConfig.model_fields}
_FLAG_TYPES: dict[str, Any] = {
    "stop": list[str], "stop_regex": list[str], "dry_sequence_breakers": list[str], "stop_token_ids": list[int],
    "logit_bias": dict[str, float],
}  # fmt: skip
_DEFAULT_MAX_TOKENS = 512


def sampling_params(given: Mapping[str, Any], model_defaults: SamplingDefaults = SamplingDefaults()) -> SamplingParams:
    """Flags over the checkpoint's generation_config over SamplingParams' own defaults. Raises InvalidRequestError."""

    def typed(value: Any) -> Any:
        if isinstance(value, list):
            return [typed(entry) for entry in value]
        return as_typed(value) if isinstance(value, str) else value

    given = {name: typed(value) for name, value in given.items()}
    return SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **model_defaults.fields(), **given})


def sampling_flags() -> list[inspect.Parameter]:
    """One keyword parameter for each field; a flag that is not given leaves the choice to the model."""
    types = get_type_hints(SamplingParams)
    for member in (member for annotation in types.values() for member in get_args(annotation)):
        if dataclasses.is_dataclass(member):  # its fields become flags as well
            documented(member)  # type: ignore[type-var]
    # The 'Attributes:' of the docstring: "a, b: text." -> {"a": "Text.", "b": "Text."}.
    attributes = re.findall(r"^ +([a-z_, ]+): (.+)$", documentation(SamplingParams), flags=re.MULTILINE)
    texts = {name: text[0].upper() + text[1:] for names, text in attributes for name in names.split(", ")}
    flags = []
    for field in dataclasses.fields(SamplingParams):
        if field.name in _LEFT_OUT:
            continue
        default = _DEFAULT_MAX_TOKENS if field.name == "max_tokens" else field.default
        shown = isinstance(default, bool | int | float)
        parameter = Parameter(
            alias="--temp" if field.name == "temperature" else None,
            help=texts[field.name] + (f" [default: {default}]" if shown else ""),
            group=SAMPLING_GROUP,
            negative=None if default is True else (),
            show_default=False,
            validator=_token_ids if field.name == "logit_bias" else None,
        )
        flags.append(_keyword(field.name, None, _FLAG_TYPES.get(field.name, types[field.name]) | None, parameter))
    return flags


def _token_ids(_: type, logit_bias: dict[str, float] | None) -> None:
    if not all(token.isdigit() for token in logit_bias or ()):
        raise ValueError(
            "it must map token ids to numbers, as in --logit-bias.42 -1.5 or --logit-bias '{\"42\": -1.5}'"
        )


_WORDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path",
}  # fmt: skip


def in_words(error: CycloptsError) -> str:
    """One line that names the flag, the value and what is accepted; errors of other kinds are in plain words as is."""
    argument = error.argument
    match error:
        case cyclopts.CoercionError() if argument is not None:
            given = _given(argument, error.token)
            accepted = " or ".join(dict.fromkeys(_words(error.target_type if given.keys else argument.hint)))
            if not accepted:
                accepted = f"a JSON object, such as {argument.name} '{{\"KEY\": VALUE}}', or {argument.name}.KEY VALUE"
            return f"{given.keyword or argument.name} is {given.value!r}: it must be {accepted}"
        case cyclopts.ValidationError() if argument is not None:
            name = next((token.keyword for token in argument.tokens if token.keyword), argument.name)
            value = " ".join(token.value for token in argument.tokens)
            return f"{name} is {value!r}: {_within(argument) or error.exception_message}"
        case cyclopts.MissingArgumentError() if argument is not None:
            if error.keyword:
                return f"{error.keyword} requires an argument"
            has_place = argument.index is not None  # the usage shows it as MODEL, which may be given as --model too
            return f"{argument.name.lstrip('-').upper() if has_place else argument.name} must be given"
        case cyclopts.MixedArgumentError() if argument is not None:
            return f"{argument.name} is given as a whole and by its keys; one of the two is accepted"
        case cyclopts.RepeatArgumentError():
            return f"{error.token.keyword} is given more than once"
    error.verbose = False
    return str(error)


def _given(argument: Argument, wrong: Token | None) -> Token:
    keyword = wrong.keyword if wrong else None
    same = [token for token in argument.tokens if token.keyword == keyword]
    return same[-1] if same else wrong or Token(keyword=argument.name)


def _within(argument: Argument) -> str:
    checks = argument.parameter.validator
    bounds = [one for one in (checks if isinstance(checks, Iterable) else [checks]) if isinstance(one, Number)]
    wanted = [f"{one.gte} or more" for one in bounds if one.gte is not None]
    wanted += [f"above {one.gt}" for one in bounds if one.gt is not None]
    return f"it must be {' and '.join(wanted)}" if wanted else ""


def _words(annotation: Any) -> list[str]:
    """What a value may be, in words: of a list, its entries; none where it is an object."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _words(get_args(annotation)[0])
    if origin in (Union, UnionType, list, tuple, set, frozenset, Sequence):
        return [word for member in get_args(annotation) if member not in (NoneType, ...) for word in _words(member)]
    if origin is dict or annotation is dict or dataclasses.is_dataclass(annotation):
        return []
    if origin is Literal:
        *others, last = map(repr, get_args(annotation))
        return [f"{', '.join(others)} or {last}" if others else last]
    return [_WORDS[annotation]]
