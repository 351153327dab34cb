"""What pydantic finds wrong with a value, in this server's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

OTHERWISE = "be as docs/api.md describes it"


def must(errors: Iterable[Mapping[str, Any]]) -> str:
    """What a value that pydantic refused would have to be, as one of several alternatives may ask.

    Worked example: errors of the types `string_type` and `list_type` are "must be a string or a list".
    """
    accepted = [_accepted(error) for error in errors]
    first, *others = dict.fromkeys(accepted)
    return " or ".join([f"must {first}", *(other.removeprefix("be ") for other in others)])


def _accepted(error: Mapping[str, Any]) -> str:
    context = {name: _plain(value) for name, value in error.get("ctx", {}).items()}
    return ACCEPTED.get(error["type"], OTHERWISE).format_map(context)


def _plain(value: Any) -> Any:
    """A bound of 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
