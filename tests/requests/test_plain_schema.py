"""Schemas say what they say: what forbids nothing is accepted, and no bound is rounded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.schema import ENFORCED_FORMATS, plain
from jaxllm.requests.structured_outputs import StructuredOutputs, compile_grammar
from tests.requests.test_closed_schema import accepts

NOTHING: dict[str, list[Any]] = {
    "$anchor": ["a"], "$comment": ["a"], "$defs": [{}, {"a": {"uniqueItems": False}}], "$dynamicAnchor": ["a"],
    "$id": ["https://example.com/a"], "$recursiveAnchor": [True, False],
    "$schema": ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"],
    "$vocabulary": [{}], "additionalItems": [True, {}], "additionalProperties": [True, {}, {"uniqueItems": False}],
    "allOf": [[{}], [True], [{"not": False}]], "anyOf": [[{}], [True]], "contentEncoding": ["base64"],
    "contentMediaType": ["text/html"], "contentSchema": [{}, {"uniqueItems": True}], "default": [1, None],
    "definitions": [{}, {"a": True}], "dependencies": [{}, {"a": []}, {"a": {}}, {"a": True}],
    "dependentRequired": [{}, {"a": []}], "dependentSchemas": [{}, {"a": True}, {"a": {"title": "b"}}],
    "deprecated": [True], "description": ["a"], "else": [{"type": "string"}], "examples": [[1]],
    "format": ["int32", "double", "binary", "idn-email", "uri-reference", "anything else"],
    "if": [True, {"type": "string"}], "items": [True, {}],
    "maxContains": [3], "maxItems": [2**53, 2**64], "maxLength": [2**32, 2**64],
    "maxProperties": [2**64], "minContains": [0, 1, 3], "minItems": [0, 0.0], "minLength": [0], "minProperties": [0],
    "not": [False, {"not": {}}, {"not": True}, {"enum": []}], "oneOf": [[{}], [True]],
    "pattern": [""], "patternProperties": [{}], "prefixItems": [[True], [{}, {}]], "properties": [{}],
    "propertyNames": [
        True, {}, {"type": "string"}, {"type": ["string", "null"]}, {"type": "string", "minLength": 0},
        {"minimum": 3, "description": "zod writes the first of these for records"},
    ],
    "readOnly": [True], "required": [[]], "then": [{"type": "string"}], "title": ["a"],
    "type": [["array", "boolean", "integer", "null", "number", "object", "string"]],
    "unevaluatedItems": [True, {}], "unevaluatedProperties": [True, {}], "uniqueItems": [False], "writeOnly": [True],
}  # fmt: skip
"""Values at which each keyword forbids nothing."""
ALWAYS_SAY_SOMETHING = {
    "$dynamicRef", "$recursiveRef", "$ref", "const", "contains", "enum", "exclusiveMaximum", "exclusiveMinimum",
    "maximum", "minimum", "multipleOf",
}  # fmt: skip
TOGETHER: list[dict[str, Any]] = [
    {"contains": {"type": "string"}, "minContains": 0},
    {"if": {"type": "string"}, "then": True, "else": {}},
    {"if": True, "else": False}, {"if": False, "then": False}, {"if": {"not": {}}, "then": {"type": "string"}},
    {"items": {}, "unevaluatedItems": False}, {"additionalProperties": {}, "unevaluatedProperties": False},
    {"anyOf": [{"type": "object", "propertyNames": {"type": "string"}}, {"not": False, "format": "a"}]},
]  # fmt: skip
ANYTHING = [1, 1.5, "a", "", [1, 1], {"b": [{}]}, {}, None, True]


@cache
def keywords() -> set[str]:
    """All that the metaschemas of 2020-12 and draft 7 describe."""
    found: set[str] = {"$recursiveAnchor", "$recursiveRef"}  # 2019-09's own
    for uri in REGISTRY:
        if "2020-12" in uri or "draft-07" in uri:
            found |= REGISTRY[uri].contents.get("properties", {}).keys()
    return found


def test_every_keyword_of_the_standard_is_looked_at() -> None:
    assert NOTHING.keys() | ALWAYS_SAY_SOMETHING == keywords()


@pytest.mark.parametrize(
    "schema", [{key: value} for key, values in NOTHING.items() for value in values] + TOGETHER, ids=json.dumps
)
def test_what_forbids_nothing_is_accepted(schema: dict[str, Any]) -> None:
    described = schema if "$schema" in schema else {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    grammar = compile_grammar(StructuredOutputs(json=described))
    for value in ANYTHING:
        if "properties" not in schema or value == {} or not isinstance(value, dict):  # which close an object
            assert accepts(grammar, json.dumps(value)), value
        jsonschema.validate(value, plain(described))


def test_a_record_as_zod_writes_it() -> None:
    record = {
        "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"},
    }  # fmt: skip
    grammar = compile_grammar(StructuredOutputs(json={"type": "array", "items": record}))
    assert accepts(grammar, '[{"a": 1, "b": 2.5}]') and not accepts(grammar, '[{"a": "1"}]')


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
CIRCLE = {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["kind"]}
SQUARE = {"type": "object", "properties": {"kind": {"const": "square"}, "a": {"type": "number"}}, "required": ["kind"]}
WRITTEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "a pattern that looks around, beside a format": (
        {"type": "string", "format": "email", "pattern": EMAIL}, '"a@b.org"', '"a"',
    ),
    "a time without an offset": (
        {"type": "string", "format": "time", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}, '"12:30"', '"12:30Z"',
    ),
    "names of a list": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "number"}},
        '{"x": 1}', '{"z": 1}',
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}}, '{"ab": 1}', '{"A": 1}',
    ),
    "alternatives by reference": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": CIRCLE}}, "null", '"null"',
    ),
    "pydantic's discriminated union": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": CIRCLE, "b": SQUARE}},
        '{"kind": "square", "a": 1}', '{"kind": "square", "a": "1"}',
    ),
    "a reference that is no URI": ({"$ref": "#/$defs/größe a", "$defs": {"größe a": {"type": "integer"}}}, "3", '"3"'),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), WRITTEN.values(), ids=WRITTEN)
def test_what_libraries_write_is_said_in_other_words(schema: dict[str, Any], right: str, wrong: str) -> None:
    grammar = compile_grammar(StructuredOutputs(json=schema))
    jsonschema.validate(json.loads(right), schema)
    assert accepts(grammar, right) and not accepts(grammar, wrong)


def test_a_tool_that_is_not_strict_goes_without_a_pattern_that_looks_around() -> None:
    emoji = {"type": "string", "pattern": r"^(?=[\s\S]*x)[a-z]+$"}
    grammar = compile_grammar(StructuredOutputs(json={**emoji, "x-guidance": {"lenient": True}}))
    assert accepts(grammar, '"ax"')
    with pytest.raises(InvalidRequestError, match="look-around"):
        compile_grammar(StructuredOutputs(json=emoji))


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({"json": False}, "json cannot be enforced: the schema is false, which allows no value"),
        ({"structural_tag": {}}, "structural_tag is malformed: structures is missing"),
    ],
)
def test_messages_say_what_is_wrong(outputs: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{problem}$"):
        compile_grammar(StructuredOutputs(**outputs))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"propertyNames": {"type": "string", "minLength": 1}}, "propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"contains": {}}, "contains"),
        ({"contains": {}, "minContains": 0, "maxContains": 1}, "maxContains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "then"),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}]}, "unevaluatedProperties"),
    ],
)
def test_what_forbids_something_is_still_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be enforced.*{keyword}"):
        compile_grammar(StructuredOutputs(json=schema))


def test_names_and_values_are_not_keywords() -> None:
    schema = {
        "properties": {"uniqueItems": {"const": {"uniqueItems": False, "not": False}}, "format": {"enum": ["x"]}},
        "default": {"format": "x"},
    }
    assert plain(schema) == schema


def test_a_dependency_on_what_is_required_anyway() -> None:
    schema = {"required": ["b"], "dependentRequired": {"a": ["b"]}}
    assert plain(schema) == {"required": ["b"]}


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS))
def test_formats_that_are_enforced(name: str) -> None:
    grammar = compile_grammar(StructuredOutputs(json={"type": "string", "format": name}))
    assert not accepts(grammar, '"?! no such thing"')
    docs = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
    assert f"`{name}`" in docs


BOUNDS = {
    "minimum": int.__ge__, "maximum": int.__le__, "exclusiveMinimum": int.__gt__, "exclusiveMaximum": int.__lt__,
}  # fmt: skip
NEAR = (3, 2**53, 2**53 + 2, 10**17, 10**18, 2**63, 2**64)


@pytest.mark.parametrize("keyword", BOUNDS)
@pytest.mark.parametrize("types", ["integer", "number", ["integer", "null"]])
def test_bounds_are_exact_or_refused(keyword: str, types: Any) -> None:
    honoured = 0
    for value in (sign * (near + more) for near in NEAR for more in (-1, 0, 1) for sign in (1, -1)):
        try:
            grammar = compile_grammar(StructuredOutputs(json={"type": types, keyword: value}))
        except InvalidRequestError as error:
            assert abs(value) > 2**53 - 1 and f"cannot be enforced: {keyword} is {value}, which" in str(error)
            continue
        honoured += 1
        for number in (value - 1, value, value + 1):
            assert accepts(grammar, str(number)) == BOUNDS[keyword](number, value), (value, number)
    assert honoured >= 12


@pytest.mark.parametrize("most", [2**53 - 1, 2**63 - 1])
def test_bounds_that_languages_have(most: int) -> None:
    grammar = compile_grammar(StructuredOutputs(json={"type": "integer", "minimum": 0, "maximum": most}))
    assert accepts(grammar, str(most)) and not accepts(grammar, str(most + 1))


@pytest.mark.parametrize("both", [{"minimum": 3, "exclusiveMinimum": 3}, {"minimum": 3, "exclusiveMinimum": True}])
def test_the_stricter_of_two_bounds(both: dict[str, Any]) -> None:
    grammar = compile_grammar(StructuredOutputs(json={"type": "integer", **both}))
    assert not accepts(grammar, "3") and accepts(grammar, "4")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "minimum": -(2**63)}, "minimum is -9223372036854775808"),
        ({"type": "integer", "maximum": 1e300}, "maximum is 1e\\+300"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf is 9007199254740993"),
        ({"const": 2**64 + 1}, "const has 18446744073709551617"),
        ({"enum": ["a", {"b": [-(2**70)]}]}, "enum has -1180591620717411303424"),
        ({"properties": {"a": {"items": {"maximum": 2**53 + 1}}}}, "maximum is 9007199254740993"),
    ],
)
def test_numbers_that_would_be_rounded_are_named(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^json cannot be enforced: {problem}"):
        compile_grammar(StructuredOutputs(json=schema))


def test_a_lenient_schema_goes_without_them() -> None:
    schema = {"type": "integer", "maximum": 2**53 + 1, "x-guidance": {"lenient": True}}
    assert plain(schema) == {"type": "integer", "x-guidance": {"lenient": True}}
