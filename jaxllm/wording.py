"""Values, and what a wrong one would have to be, in plain words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

ACCEPTED: Mapping[str, str] = {
    "string_type": "be a string", "string_unicode": "be a string of valid Unicode",
    "string_too_short": "have at least {min_length} characters",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match the pattern {pattern}",
    "int_type": "be an integer", "int_from_float": "be an integer", "int_parsing": "be an integer",
    "int_parsing_size": "be a 64-bit integer",
    "float_type": "be a number", "float_parsing": "be a number", "finite_number": "be a finite number",
    "bool_type": "be true or false", "bool_parsing": "be true or false",
    "list_type": "be a list", "dict_type": "be an object", "model_type": "be an object",
    "frozen_set_type": "be a list", "tuple_type": "be a list", "path_type": "be a path",
    "datetime_type": "be a day or a time", "datetime_parsing": "be a day or a time",
    "datetime_from_date_parsing": "be a day or a time",
    "date_from_datetime_parsing": "be a day, as 2027-01-31", "date_parsing": "be a day, as 2027-01-31",
    "date_type": "be a day, as 2027-01-31", "date_from_datetime_inexact": "be a day, as 2027-01-31",
    "model_attributes_type": "be an object",
    "literal_error": "be {expected}", "none_required": "be null",
    "greater_than_equal": "be {ge} or more", "less_than_equal": "be at most {le}",
    "greater_than": "be above {gt}", "less_than": "be below {lt}",
    "too_short": "have at least {min_length} entries", "too_long": "have at most {max_length} entries",
    "union_tag_invalid": "be an object whose {discriminator} is one of {expected_tags}",
    "union_tag_not_found": "be an object with a {discriminator}",
    "value_error": "be a file, with its name",  # FastAPI's own, of a form's part that is none
}  # fmt: skip
"""pydantic's type of an error -> what the value must do, with names out of the error's context."""

_CONSTANT = re.compile(r"(?<!')\b(True|False|None)\b(?!')")
_ONE = re.compile(r"\b(1 )(entries|characters)\b")
OTHERWISE = "be as docs/api.md describes it"


def wrong_setting(error: Mapping[str, Any]) -> str:
    """What a setting would have to be: a whole sentence where a check of our own has refused it."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "it must be given"
        case "extra_forbidden":
            return "there is no such key"
    return f"it must {_accepted(error, 'be as docs/configuration.md describes it')}"


def must(errors: Iterable[Mapping[str, Any]]) -> str:
    """What a value that pydantic refused must be, for one or several alternatives: "must be a string or a list"."""
    accepted = [_accepted(error, OTHERWISE) for error in errors]
    first, *others = dict.fromkeys(accepted)
    return " or ".join([f"must {first}", *(other.removeprefix("be ") for other in others)])


def _accepted(error: Mapping[str, Any], otherwise: str) -> str:
    context = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
    text = ACCEPTED.get(error["type"], otherwise).format_map(context)
    return _ONE.sub(lambda found: found[1] + {"entries": "entry", "characters": "character"}[found[2]], text)


def _plain(value: Any) -> Any:
    """A bound of 1.0 as 1, and `False` among the values of a Literal as `false`."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return _CONSTANT.sub(lambda found: {"True": "true", "False": "false", "None": "null"}[found[0]], value)
    return value


def did_you_mean(name: str, known: Any, most: int = 1) -> str:
    """'; did you mean 'a' or 'b'?' for the nearest known names, `most` at most, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


_KINDS: Mapping[type, str] = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list",
    dict: "an object",
}  # fmt: skip


def kind_of(value: object) -> str:
    """What a value of JSON or YAML is, in words, such as "a list"; "something else" is YAML's days."""
    return _KINDS.get(type(value), "something else")


_LENGTH = 100
_ENTRIES = 10
_DEPTH = 4


def shown(value: Any) -> str:
    """JSON's words for it, or a text in quotes, cut to a line: `{"a": [None, True]}` is `{"a": [null, true]}`."""
    text = repr(value[: _LENGTH + 1]) if isinstance(value, str) else _beginning(value, _DEPTH)
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"


def _beginning(value: Any, depth: int) -> str:
    match value:
        case str():
            beginning = value[: _LENGTH + 1]
            return json.dumps(beginning, ensure_ascii=not beginning.isprintable())
        case None | bool():
            return json.dumps(value)
        case list() | dict() if not depth:
            return "…"
        case list():
            entries = [_beginning(entry, depth - 1) for entry in value[:_ENTRIES]]
            return f"[{', '.join(entries)}{', …' * (len(value) > _ENTRIES)}]"
        case dict():
            pairs = [f"{_beginning(k, 1)}: {_beginning(v, depth - 1)}" for k, v in islice(value.items(), _ENTRIES)]
            return f"{{{', '.join(pairs)}{', …' * (len(value) > _ENTRIES)}}}"
        case _:
            return repr(value)
