"""The tables of docs/api.md: the routes and fields of api_surface.py, with the tests that claim to cover them."""

from __future__ import annotations

import json
from typing import Any

from tests.serving.api_coverage import claims
from tests.serving.api_surface import INERT, Section, routes, sections

TESTS = "https://github.com/jaxllm/jaxllm/blob/main/tests/serving"
REFUSED_TEST = f"[test_fields_of_other_servers_are_refused_by_name]({TESTS}/test_api.py)"
INERT_TEST = f"[test_inert_fields_change_nothing]({TESTS}/test_api.py)"


def routes_table() -> str:
    rows = [("Route", "What", "Streams", "Test")]
    for route in routes():
        streams = "yes" if route.streams else ""
        rows.append((f"`{route}`", _line(route.summary), streams, _tests(str(route))))
    return _table(rows)


def fields_tables() -> str:
    return "\n".join(_section(section) for section in sections())


def _section(section: Section) -> str:
    rows = [("Field", "Accepts", "Meaning", "Status", "Test")]
    for name, schema in section.fields.items():
        status = "inert" if schema["description"].startswith(INERT) else "honoured"
        meaning = _line(schema["description"])
        rows.append((f"`{name}`", _accepts(schema), meaning, status, _tests(section.title, name) or INERT_TEST))
    if section.refused:
        rows.append((_codes(section.refused), "", "Fields of other servers.", "refused", REFUSED_TEST))
    if section.parents:
        place = f"In {_codes(sorted(section.parents))}."
    elif str(section.routes[0]) == section.title:
        place = "In the form." if section.title.startswith("POST") and "file" in section.fields else "In the address."
    else:
        place = f"In the body of {_codes([str(route) for route in section.routes])}."
    return f"### {section.title}\n\n{' '.join([_line(section.intro), place]).strip()}\n\n{_table(rows)}"


def _accepts(schema: dict[str, Any]) -> str:
    text = _kind(schema)
    if schema["required"]:
        return f"{text}; required"
    default = schema.get("default")
    return text if default in (None, []) else f"{text}; default `{json.dumps(default)}`"


def _kind(schema: dict[str, Any]) -> str:
    """{"type": "array", "items": {"type": "string"}} -> 'list of string'"""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_kind(part) for part in schema[union] if part.get("type") != "null"))
    if "$ref" in schema:
        return _named(schema["$ref"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}{_bounds(schema, 'minItems', 'maxItems')}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return schema.get("type", "anything") + _bounds(schema, "minimum", "maximum")


def _named(model: str) -> str:
    shown = {section.title for section in sections()}
    return f"[{model}](#{model.lower()})" if model in shown else model


def _bounds(schema: dict[str, Any], least: str, most: str) -> str:
    low, high = (_number(schema[name]) if name in schema else None for name in (least, most))
    if low is not None and high is not None:
        return f", {low} to {high}"
    return f", {low} or more" if low is not None else f", up to {high}" if high is not None else ""


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _tests(subject: str, field: str | None = None) -> str:
    """Links to the tests of a route, or of one field of a section."""
    found = [claim for claim in claims() if claim.subject == subject]
    shown = [claim for claim in found if (field in claim.fields if field is not None else not claim.fields)]
    return ", ".join(f"[{claim.test}]({TESTS}/{claim.file})" for claim in shown)


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ("---",) * len(head), *others])
