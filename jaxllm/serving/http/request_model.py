"""The base of all request bodies: strict types, and no field ignored in silence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.sampling import INT64_MAX, INT64_MIN
from jaxllm.serving.http.answers import MAX_WARNINGS, ignored_fields
from jaxllm.serving.http.json_body import Integers
from jaxllm.wording import did_you_mean, shown

MAX_NAME_LENGTH = 64  # of a field for which a similar name is looked up

MAX_LABEL_LENGTH = 256
Label = Field(default=None, max_length=MAX_LABEL_LENGTH, pattern=r"^[!-~]([ -~]*[!-~])?$")
"""A name of the caller's own, of printable ASCII: what a header may hold."""

SAID_BY_PRESENCE = {"web_search_options"}
"""Fields of which an empty object asks for something."""
_BODIES: list[type[RequestModel]] = []  # the models that have a path
FOREVER = sys.float_info.max
"""As long as there is room for it. Infinity is no number of a request's."""
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+|0)", re.ASCII)
_MAX_LENGTH = 64


def refuse(message: str, param: str | None = None) -> PydanticCustomError:
    """An error for a validator to raise, its message shown as it is; a model's validator names the field in `param`."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


@contextmanager
def refusing(field: str | None = None) -> Iterator[None]:
    """For validators: what is said about the request inside becomes an error of the body, by default of this field."""
    try:
        yield
    except InvalidRequestError as error:
        raise refuse(str(error), field) from None


def are_integers(values: list[Any]) -> bool:
    return isinstance(values, Integers) or all(type(value) is int for value in values)


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("fail_fast"):
            return  # it is part of several models
        for part in schema.values():
            _fail_fast(part)
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            if schema.get("items_schema") == {"type": "int"} and not schema.keys() & {"min_length", "max_length"}:
                unchecked = core_schema.list_schema(**{name: part for name, part in schema.items() if name != "type"})
                schema.clear()
                schema.update(core_schema.no_info_wrap_validator_function(_unless_known, unchecked))
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


def _unless_known(value: Any, validate: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, Integers) else validate(value)


class RequestModel(BaseModel):
    """A JSON object of which every field is honoured or refused: unknown names, wrong types and infinities are errors.

    null means absent. `unsupported` lists names that other servers know; they are refused as such, unless their value
    is empty. Where `ignored_fields` holds a list, unknown and unsupported fields are left out and noted there instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    unsupported: ClassVar[frozenset[str]] = frozenset()
    path: ClassVar[str] = ""
    """The route of a whole body, which others point to for a field of its own."""
    called_here: ClassVar[Mapping[str, str]] = {}
    """Names here of fields that other routes call otherwise."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "path" in cls.__dict__:
            _BODIES.append(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists are refused at their first wrong entry: an error for each of a million takes seconds and gigabytes.

        Those that are known to hold integers are not looked through again.
        """
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known, ignored = cls.field_names(), ignored_fields.get()
        present = {name: value for name, value in data.items() if value is not None}
        for name in data:
            if name in known:
                continue
            value = present.get(name)
            is_empty = value in (None, "", []) or (value == {} and name not in SAID_BY_PRESENCE)
            if name in cls.unsupported and is_empty:  # SDKs send whole objects with empty values in them
                present.pop(name, None)
                continue
            if ignored is None:
                raise refuse(cls._problem(name), name)
            present.pop(name, None)
            if len(ignored) == MAX_WARNINGS:
                continue  # similar names are slow to find
            warning = f"{cls.__name__}: {cls._problem(name)}; ignored"
            if warning not in ignored:
                ignored.append(warning)
        return present

    @classmethod
    def _problem(cls, name: str) -> str:
        if len(name) > MAX_NAME_LENGTH:
            return f"unknown field {shown(name)}"
        if name in cls.called_here:
            return f"unknown field {shown(name)}; here it is {shown(cls.called_here[name])}"
        if name in cls.unsupported:
            return f"{name} is not supported by this server"
        if cls.path and (others := sorted(body.path for body in _BODIES if name in body.field_names())):
            return f"unknown field {shown(name)}; it is a field of {', '.join(others)}"
        return f"unknown field {shown(name)}{did_you_mean(name, cls.field_names())}"

    @classmethod
    def field_names(cls) -> dict[str, None]:
        """The names of the fields as JSON spells them, in order."""
        return {field.alias or name: None for name, field in cls.model_fields.items()}


class Unread(RequestModel):
    """An object of which only the fields below are read; the others are kept as they came."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        return data


class CacheControl(RequestModel):
    """Accepted, without effect: prefixes are cached by themselves, for as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Accepted, without effect: prefixes are cached by themselves."""
    scope: str | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


class CacheOptions(RequestModel):
    """Prefixes are cached by themselves, for as long as there is room."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"comparison_response_id"})

    mode: Literal["implicit", "explicit"] | None = None
    """Accepted, without effect: prefixes are cached by themselves."""
    ttl: Literal["30m", "12h"] | None = None
    """Accepted, without effect: prefixes stay as long as there is room."""
    prewarm: Literal[False] | None = None
    """Only false: to warm the cache, ask for one token."""


class CacheFields(RequestModel):
    """Settings of OpenAI's cache of prompts."""

    prompt_cache_key: str | None = None
    """Accepted, without effect: prefixes are always shared."""
    prompt_cache_options: CacheOptions | None = None
    """Accepted, without effect: prefixes are cached by themselves."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Accepted, without effect: prefixes stay as long as there is room."""


class CacheBreakpoint(RequestModel):
    """Accepted, without effect: prefixes are cached by themselves."""

    mode: Literal["explicit"]
    """Accepted, without effect: prefixes are cached by themselves."""
    ttl: Literal["30m", "12h"] | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


class Cacheable(RequestModel):
    """What a client may mark as the end of a prefix."""

    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


def seconds(value: Any) -> Any:
    """'1h30m' -> 5400.0, 300 -> 300.0, -1 and '-1m' -> FOREVER; a validator, which refuses all else."""
    match value:
        case None:
            return None
        case bool():
            pass
        case int() | float():
            return FOREVER if value < 0 else float(value)
        case str() if len(value) <= _MAX_LENGTH and (found := _DURATION.fullmatch(value)):
            parts = re.findall(_PART, found[2])
            total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            return FOREVER if found[1] == "-" and total else total
    raise refuse(
        f'keep_alive is {shown(value)}; it must be seconds, or a time such as "10m" or "1h30m"; 0 unloads the model '
        "after the request, and what is below 0 never"
    )


class KeepAliveFields(RequestModel):
    """How long a model stays."""

    keep_alive: Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=float | str | None)] = None
    """How long the model stays loaded after this request, as "10m", or seconds; 0: not at all, -1: for good."""


class ScheduledFields(KeepAliveFields):
    """How soon a request runs, and with whom it shares."""

    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    """Lower runs earlier."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Only requests with the same salt share cached prefixes."""
    user: str | None = None
    """Accepted, without effect, as OpenAI documents it."""


class ModelFields(RequestModel):
    """The model that is asked."""

    model: str | None = None
    """A name that /v1/models lists; by default the first."""


class Rule(NamedTuple):
    """`fields` may not ask for anything `where` something holds of the request.

    They are given by name with the values besides null that ask for nothing. The error is the name and the `problem`.
    """

    where: Callable[[Any], bool]
    fields: Mapping[str, tuple[Any, ...]]
    problem: str


def check_rules(body: RequestModel, rules: Iterable[Rule]) -> None:
    """Refuse the first field that asks for something where it may not."""
    for rule in rules:
        if rule.where(body):
            for name, neutral in rule.fields.items():
                if name in body.model_fields_set and getattr(body, name) not in (None, *neutral):
                    raise refuse(f"{name} {rule.problem}", name)


def check_equal(name: str, value: object, other: str, others: object) -> None:
    """Refuse a setting that two fields, the first of them `name`, set to different values."""
    if value is not None and others is not None and value != others:
        raise refuse(f"{name} is {value} and {other} is {others}: they are one setting, give one of them", name)
