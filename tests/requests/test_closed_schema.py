"""Schemas are closed where they name properties: what is generated is valid, and nothing is invented."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import llguidance
import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.requests.closed_schema import closed
from jaxllm.requests.schema import UnenforceableError
from jaxllm.requests.structured_outputs import StructuredOutputs, compile_grammar

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
KIND_A, KIND_B = (
    {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind", kind]}
    for kind in "ab"
)
PAIR = {"type": "object", "properties": {"p": A, "q": {"type": "integer"}}, "required": ["p"]}

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "plain": (A, [{"a": 1}], [{"a": 1, "x": 1}, {"x": 1}]),
    "nested": (PAIR, [{"p": {"a": 1}}], [{"p": {"a": 1, "x": 1}}, {"p": {"a": 1}, "x": 1}]),
    "items": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "x": 1}]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [A], "items": B}, [[{"a": 1}, {"b": 1}]],
        [[{"a": 1, "x": 1}], [{"a": 1}, {"b": 1, "x": 1}]],
    ),
    "$ref": (
        {"$defs": {"A": A}, "type": "object", "properties": {"p": {"$ref": "#/$defs/A"}}}, [{"p": {"a": 1}}],
        [{"p": {"a": 1, "x": 1}}, {"x": 1}],
    ),
    "root $ref": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"a": 1, "x": 1}]),
    "recursive": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}}, [{}, {"next": {"next": {}}}], [{"next": {"x": 1}}],
    ),
    "anyOf": ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None], [{"a": 1, "x": 1}]),
    "anyOf $ref": (
        {"$defs": {"A": A}, "type": "object",
         "properties": {"p": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}},
        [{"p": {"a": 1}}, {"p": None}], [{"p": {"a": 1, "x": 1}}],
    ),
    "oneOf told apart": (
        {"oneOf": [KIND_A, KIND_B]}, [{"kind": "a", "a": 1}, {"kind": "b", "b": 1}], [{"kind": "a", "a": 1, "x": 1}],
    ),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, [{"a": 1}], [{"a": 1, "x": 1}]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "x": 1}]),
    "allOf $ref": (
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "x": 1}],
    ),
    "allOf beside properties": (
        {"type": "object", "properties": {"c": A}, "allOf": [B]}, [{"c": {"a": 1}, "b": 1}],
        [{"c": {"a": 1, "x": 1}, "b": 1}, {"b": 1, "x": 1}],
    ),
    "allOf of one property": (
        {"allOf": [{"type": "object", "properties": {"p": A}}, {"type": "object", "properties": {"p": B}}]},
        [{"p": {"a": 1, "b": 1}}], [{"p": {"a": 1, "b": 1}, "x": 1}],
    ),
    "a definition in both places": (
        {"$defs": {"A": A}, "type": "object",
         "properties": {"p": {"$ref": "#/$defs/A"}, "q": {"allOf": [{"$ref": "#/$defs/A"}, B]}}},
        [{"p": {"a": 1}, "q": {"a": 1, "b": 1}}], [{"q": {"a": 1, "b": 1, "x": 1}}],
    ),
    "required, not declared": (
        {"type": "object", "properties": {"a": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": "x"}],
        [{"b": 1, "x": 1}],
    ),
    "said": ({**A, "additionalProperties": True}, [{"a": 1, "x": 1}], []),
    "a schema": ({**A, "additionalProperties": {"type": "integer"}}, [{"a": 1, "x": 1}], [{"a": 1, "x": "1"}]),
    "patterns": ({**A, "patternProperties": {"^x": {"type": "integer"}}}, [{"a": 1, "x": 1}], []),
    "none declared": ({"type": "object"}, [{"x": 1}], []),
    "none": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    "more asked for": (
        {**A, "minProperties": 2}, [{"a": 1, "x": 1}], [{"a": 1}],
    ),
    "under an open one": (
        {"type": "object", "additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"a": 1, "x": 1}}],
    ),
}  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_declared(name: str) -> None:
    schema, good, bad = CASES[name]
    kept = json.dumps(schema)
    grammar = compile_grammar(StructuredOutputs(json=schema))
    assert json.dumps(schema) == kept, "it is the caller's"
    for value in good:
        jsonschema.validate(value, schema)
        jsonschema.validate(value, closed(schema))
        assert accepts(grammar, json.dumps(value)), value
    for value in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, closed(schema))
        assert not accepts(grammar, json.dumps(value)), value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}, "$ref": "#/$defs/d", "$defs": {"d": {"minProperties": 1}}},
        {
            "allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}],
            "minProperties": 2,
        },
        {"oneOf": [{"type": "object", "properties": {}}], "minProperties": 1},
        {"type": "object", "properties": {}, "anyOf": [{"properties": {"a": {}}}, {"maxProperties": 3}]},
    ],
)
def test_more_properties_than_are_declared_may_come_where_another_part_asks_for_them(schema: dict[str, Any]) -> None:
    grammar = compile_grammar(StructuredOutputs(json=schema))
    jsonschema.validate({"a": 1, "x": 1}, schema)
    assert accepts(grammar, json.dumps({"a": 1, "x": 1}))


FREE = {"type": "object", "additionalProperties": {"type": "integer"}}
COUNTED: list[dict[str, Any]] = [
    {**FREE, "minProperties": 2},
    {"minProperties": 2},
    {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "required": ["a"], "minProperties": 3},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 3},
    {"type": "array", "items": {**FREE, "minProperties": 2}},
    {"allOf": [FREE, {"minProperties": 2}]},
    {"anyOf": [{**FREE, "minProperties": 2}, {"type": "null"}]},
    {"$ref": "#/$defs/d", "$defs": {"d": {**FREE, "minProperties": 2}}},
    {**FREE, "minProperties": 2, "properties": {"a": {"$ref": "#a"}}, "required": [], "$defs": {"d": {"$anchor": "a"}}},
]


@pytest.mark.parametrize("schema", COUNTED, ids=json.dumps)
def test_no_number_of_properties_is_made_up_by_repeating_one(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"minProperties is . where . properties are required"):
        compile_grammar(StructuredOutputs(json=schema))
    assert "minProperties" not in json.dumps(closed({**schema, "x-guidance": {"lenient": True}}))


@pytest.mark.parametrize(
    "schema",
    [
        {**FREE, "minProperties": 1}, {**FREE, "required": ["a"], "minProperties": 2},
        {"allOf": [{**FREE, "minProperties": 2}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"required": ["a"]}}},
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2},
        {"anyOf": [{**FREE, "required": ["a"], "minProperties": 2}, {"type": "null"}]},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_one_property_more_than_is_required_may_have_any_name(schema: dict[str, Any]) -> None:
    grammar = compile_grammar(StructuredOutputs(json=schema))
    assert accepts(grammar, '{"a": 1, "b": 2}')
    assert not accepts(grammar, '{"a": 1, "a": 2}') or schema.get("minProperties") == 1


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/E"}}, "required": ["x"]}
HAS: dict[str, Any] = {"$defs": {"E": ENDLESS}}
E = {"$ref": "#/$defs/E"}
CASES |= {
    "endless, optional": ({**HAS, "type": "object", "properties": {"e": E, "a": {}}}, [{}, {"a": 1}], [{"e": {}}]),
    "endless or an integer": ({**HAS, "anyOf": [E, {"type": "integer"}]}, [1], [{"x": 1}]),
    "endless items": ({**HAS, "type": "array", "items": E}, [[]], [[{}]]),
    "endless but for null": ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, [None], [[None, []]]),
    "a list": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        [{"next": None}, {"next": {"next": None}}], [{}],
    ),
}  # fmt: skip
del CASES["endless but for null"][2][0][0]


@pytest.mark.parametrize(
    "schema",
    [
        {**HAS, **E},
        {"$ref": "#"},
        {**HAS, "anyOf": [E, {"type": "array", "items": E, "minItems": 1}]},
        {**HAS, "oneOf": [E, ENDLESS]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"$ref": "#"}], "minItems": 2},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["k"]},
        {"type": "object", "allOf": [{"properties": {"x": {"$ref": "#"}}}], "required": ["x"]},
        {**HAS, "allOf": [{"anyOf": [E, {"type": "null"}]}, {"type": "object"}]},
    ],
    ids=json.dumps,
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^json cannot be enforced: no finite value satisfies the schema"):
        compile_grammar(StructuredOutputs(json=schema))


def _values(depth: int) -> list[Any]:
    if depth == 0:
        return [None, 1, "s", [], {}]
    inner = _values(depth - 1)
    return [*inner, *([value] for value in inner), *({name: value} for name in "ab" for value in inner)]


def _drawn(random: Random, depth: int = 0) -> Any:
    def inner() -> Any:
        return _drawn(random, depth + 1)

    kinds: list[dict[str, Any]] = [{"type": "object"}, {"type": "array"}, {"$ref": f"#/$defs/{random.choice('AB')}"}]
    schema = random.choice([*kinds, {"type": ["object", "null"]}, {"type": "integer"}, {}])
    if depth < 2 and random.random() < 0.8:
        schema |= {"properties": {name: inner() for name in random.choice(("a", "b", "ab"))}, "required": []}
        schema["required"] = [name for name in "ab" if random.random() < 0.5]
    if depth < 2 and random.random() < 0.4:
        schema |= {"items": inner(), "minItems": random.randrange(2)}
    if depth < 2 and random.random() < 0.3:
        schema[random.choice(("allOf", "anyOf"))] = [inner(), inner()]
    return schema


def test_a_schema_with_a_finite_value_is_not_refused() -> None:
    """And the value is still valid: only values without an end are forbidden."""
    random, values, refused = Random(7), _values(2), 0
    for _ in range(300):
        schema = {"$defs": {name: _drawn(random) for name in "AB"}, **_drawn(random)}
        try:
            left, valid = jsonschema.Draft202012Validator(schema), []
            valid = [value for value in values if left.is_valid(value)]
        except RecursionError:
            continue  # a reference to itself, which the oracle does not take
        try:
            kept = jsonschema.Draft202012Validator(closed(schema))
        except UnenforceableError:
            refused += 1
            assert valid == [], schema
            continue
        assert all(kept.is_valid(value) for value in valid if not isinstance(value, dict | list)), schema
    assert 20 < refused < 200


def test_what_is_refused_closed_is_refused() -> None:
    """Nothing is enforced in part: an object that may have other properties is refused for the same reasons."""
    optional = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}
    for schema in (optional, {**optional, "additionalProperties": True}):
        with pytest.raises(InvalidRequestError, match=r"min/maxProperties|at most one more may have"):
            compile_grammar(StructuredOutputs(json=schema))


def test_what_would_match_nothing_stays_open() -> None:
    for schema in (
        CASES["more asked for"][0],
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "additionalProperties": True},
        {"allOf": [{"$ref": "https://example.com/a"}, A]},
    ):
        assert closed(schema) == schema


def test_one_of_several_stays_one() -> None:
    """{"a": 1} matches both of these, so it is not valid; closed each by itself they would allow it."""
    schema = {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
    for value in ({"a": 1}, {"b": 1}, {}):
        for either in (schema, closed(schema)):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(value, either)
