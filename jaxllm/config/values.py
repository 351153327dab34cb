"""How values of settings are written: sizes, lists, pairs and objects, as text and as YAML has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticKnownError


class SettingsGroup(BaseModel):
    """A group of settings: they do not change, one that is not known is refused, and a switch is no number."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _switches_are_no_numbers(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """pydantic takes true for 1, and `yes` in a YAML file is true."""
        assert info.field_name is not None
        if isinstance(value, bool) and _counts(cls.model_fields[info.field_name].annotation):
            raise PydanticKnownError("float_type")
        return value

    @pydantic.model_validator(mode="after")
    def _go_together(self) -> Self:
        if (fault := next(self._faults(), None)) is not None:
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        """Sentences about settings that are right one by one and not together; the first one is raised."""
        yield from ()

    def _in_vain(self, needed: Mapping[str, str]) -> Iterator[str]:
        """Faults of settings that change nothing while the one which they need has its default."""
        for name, other in needed.items():
            if not self._is_default(name) and self._is_default(other):
                yield f"{name} is {getattr(self, name)}, which changes nothing without {other}"

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == type(self).model_fields[name].default)


def _counts(annotation: Any) -> bool:
    """Whether a type is one of numbers, or of several that have no bool among them."""
    kinds = {part if isinstance(part, type) else type(part) for part in _parts(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds


def _parts(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    yield from (part for one in inner for part in _parts(one)) if inner else (annotation,)


def of_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Has a text parsed; anything else is left for pydantic to judge."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def must_be(accepted: str, check: Callable[[str], object]) -> AfterValidator:
    """Refuses a text that does not pass `check`, with what is accepted in words."""

    def checked(text: str) -> str:
        if not check(text):
            raise ValueError(f"it must {accepted}")
        return text

    return AfterValidator(checked)


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """'2GiB', '500 MB' or '1073741824' -> bytes."""
    try:
        return int(_amount(text.strip().lower().removesuffix("b"), _UNITS))
    except (ValueError, OverflowError):
        raise ValueError("it must be a number of bytes, such as 4GiB or 500MB") from None


def _amount(text: str, units: Mapping[str, int]) -> float:
    """Raises ValueError where `text` is no number with a unit after it, or with none."""
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * units.get(unit, 1)


def format_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def or_auto(least: int) -> BeforeValidator:
    """'3' -> 3; 'auto' and null stay."""

    def parse(value: Any) -> Any:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if value in (None, "auto") or (type(value) is int and value >= least):
            return value
        raise ValueError(f"it must be a whole number from {least} on, or auto")

    return BeforeValidator(parse)


def parse_count(text: str) -> int | str | None:
    """'128k' -> 128000, '128K' -> 131072, 'auto' and '-1' -> None, as vLLM has them; pydantic judges anything else."""
    if text.lower() in ("auto", "-1"):
        return None
    units = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmKM])", text.strip())
    return text if found is None else int(float(found[1]) * units[found[2]])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_seconds(text: str) -> float:
    """'30d', '12h', '90m' or '45' -> seconds."""
    try:
        return _amount(text.strip().lower(), _SECONDS)
    except ValueError:
        raise ValueError("it must be a time, such as 30d, 12h, 90m or a number of seconds") from None


Bytes = Annotated[int, of_text(parse_bytes)]
Seconds = Annotated[float, of_text(parse_seconds), pydantic.AllowInfNan(False)]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
Isq = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "int8", "int4", "fp8", "w8a8"
]  # fmt: skip


def parse_sizes(value: Any) -> Any:
    """'8,64' -> ['8', '64'], and 8 -> [8]; anything else is left for pydantic to judge."""
    return value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value


Sizes = Annotated[frozenset[Annotated[int, Field(ge=1)]], BeforeValidator(parse_sizes)]


def is_served_name(text: str) -> bool:
    """Whether requests can name a model or an adapter so, and lists of names can be read."""
    return bool(text) and text.isprintable() and "," not in text and text == text.strip()


def is_pattern(name: str) -> bool:
    """Whether a served name stands for others: `claude-*` for all that begin so."""
    return "*" in name


def matches(pattern: str, name: str) -> bool:
    begin, _, end = pattern.partition("*")
    return len(name) >= len(begin) + len(end) and name.startswith(begin) and name.endswith(end)


SERVED_NAME = "printable characters, without a comma and without spaces around them"
"""What `is_served_name` accepts, in words."""
ServedName = Annotated[str, must_be(f"be {SERVED_NAME}", is_served_name)]


def comma_separated(value: str | None) -> list[str]:
    """'a, b' -> ['a', 'b']"""
    return [part for item in (value or "").split(",") if (part := item.strip())]


NameList = Annotated[tuple[str, ...], of_text(comma_separated)]
SomeOf = Annotated[str, must_be("have at least one entry; leave it out, or say null, for none", comma_separated)]
"""Entries separated by commas. None is a mistake: a key that a variable was to hold, without which anybody may call."""


def parse_entries(value: Any) -> Any:
    """'["a", "b"]' and ['a', 'b'] -> 'a,b', since vLLM takes JSON; anything else is left for pydantic to judge."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value)
        if not isinstance(value, list):
            raise ValueError('it must be separated by commas, or a JSON list such as ["*"]')
    return ",".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value


Entries = Annotated[str, BeforeValidator(parse_entries)]
"""Entries separated by commas, also where they come as a list."""


def _origins(value: str) -> str:
    for origin in comma_separated(value):
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; it must be * or as https://chat.example:8443, in lower case")
    return value


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
Origins = Annotated[Entries, AfterValidator(_origins)]


def parse_pairs(text: str) -> dict[str, str]:
    """'a=1,b=2' -> {'a': '1', 'b': '2'}"""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(middle for _, middle, _ in pairs):
        raise ValueError("it must be PATTERN=KIND, several separated by commas")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is set twice")
    return {name.strip(): kind.strip() for name, _, kind in pairs}


IsqMap = Annotated[dict[str, Literal[Isq, "none"]], of_text(parse_pairs)]


def parse_object(text: str) -> dict[str, Any]:
    """'{"a": 1}' -> {'a': 1}"""
    found = _json(text)
    if not isinstance(found, dict):
        raise ValueError('it must be a JSON object, such as {"key": 1}')
    return found


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1, "c": 2}} and {"a": {"b": 3}} -> {"a": {"b": 3, "c": 2}}"""
    both = ((key, one.get(key), value) for key, value in other.items())
    return {**one} | {
        key: merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new for key, old, new in both
    }


def _json(text: str) -> Any:
    """None where the text is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_named_paths(value: Any) -> Any:
    """'a=x,b=y', {'a': 'x'} or ['a=x'] -> [{'name': 'a', 'path': 'x'}, …]; objects stay as they are, JSON is read."""
    if isinstance(value, str):
        is_json = value.lstrip().startswith(("[", "{"))
        value = _json(value) if is_json else comma_separated(value)
        if value is None:
            raise ValueError('it must be NAME=PATH, or JSON such as {"name": "sql", "path": "/adapters/sql"}')
    if isinstance(value, dict):
        value = [value] if "name" in value else [{"name": name, "path": path} for name, path in value.items()]
    if not isinstance(value, list):
        return value
    found = [_named_path(item) for item in value]
    names = [item["name"] for item in found if isinstance(item, dict) and "name" in item]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is there twice; each needs a name of its own")
    return found


def _named_path(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    if item.lstrip().startswith("{"):
        return parse_object(item)
    name, equals, path = (part.strip() for part in item.partition("="))
    if not (name and equals and path):
        raise ValueError("it must be NAME=PATH, several separated by commas")
    return {"name": name, "path": path}


DTYPES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32",
}  # fmt: skip
"""What other servers call the types of numbers."""
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], of_text(lambda text: DTYPES.get(text.lower(), text))
]
FromCount = of_text(parse_count)
FromJSON = of_text(parse_object)
Object = Annotated[dict[str, Any], FromJSON]


def parse_prefix(text: str) -> str | None:
    """'/llm/' -> '/llm', and '' and '/' -> None"""
    prefix = text.rstrip("/")
    if prefix and not PREFIX.fullmatch(prefix):
        raise ValueError("it must be a path of letters, digits and -._~, such as /llm")
    return prefix or None


PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
"""What a proxy may put before the routes: it gets into pages, so it may hold nothing that means something there."""
PathPrefix = Annotated[str | None, of_text(parse_prefix)]


def choices(annotation: Any) -> tuple[Any, ...]:
    """Literal["a", "b"] | None -> ("a", "b"); nothing where other values are accepted too."""
    types = [kind for kind in members(annotation) if kind is not type(None)]
    return get_args(types[0]) if len(types) == 1 and get_origin(types[0]) is Literal else ()


def members(annotation: Any) -> list[Any]:
    """Annotated[int, …] | None -> [int, NoneType]."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]
