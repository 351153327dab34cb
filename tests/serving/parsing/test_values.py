"""Values that are not written as JSON: Python's literals, and text between tags that a schema makes a value of."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from jaxllm.chat.conversation import Tool
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import OutputParser
from jaxllm.chat.values import value_types
from tests.serving.parsing.splitting import parse_every_way, tool


def read(name: str, text: str, known: Tool) -> tuple:
    formats = detect_formats(None, name, "none")
    return parse_every_way(lambda: OutputParser(formats, tools=[known], in_reasoning=False), text)


LITERALS = (
    r"""
(4, -7)
()
(4,)
(4)
((1, 2), [3, (4,)])
{1, 2}
{1}
{(1, 2)}
{}
{'a': (1,), 'b': {2}}
{'a': {'b', }}
{1: 2, False: 3, None: 4, 1.5: 5}
{'a': 1,}
[1, 2,]
[]
+3
-3
1_000
0x1F
0b101
0o17
.5
5.
1e3
-1.5e-3
1_0.5_0
True
None
''
""
'a' 'b'
'a'   "b" r'\d'
( 'a' 'b' )
r'\d\'+'
R"a\"b"
u'é'
'''a'b"c'''
""\"say "hi" ""\"
'''a''' 'b'
'\x41\u00e9\U0001F338\101\0\N{BULLET}\n\\'
'x)], y'
""".replace('""\\"', '"""')
    .strip()
    .splitlines()
)


@pytest.mark.parametrize("literal", [*LITERALS, "'''two\nlines'''", "'a'\n'b'"])
def test_python_literals(literal: str) -> None:
    content, _, calls = read("llama4_pythonic", f"[plot(at={literal}, ok=True)]", tool("plot", {}))
    assert content is None and [name for name, _ in calls] == ["plot"], (content, calls)
    assert json.loads(calls[0][1]) == {"at": _as_json(ast.literal_eval(f"({literal})")), "ok": True}


def _as_json(value: Any) -> Any:
    """A literal's value as JSON has it: sets and tuples are arrays, and json.dumps says what keys become."""
    if isinstance(value, list | tuple | set):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return json.loads(json.dumps({key: _as_json(item) for key, item in value.items()}))
    return value


@pytest.mark.parametrize(
    "value",
    [
        "1_0e999", "b'x'", "f'x'", "1j", "soon", "--3", "0x", "1__0", "(1, 2",
        "{[1]: 2}", "{1: 2, 3}", "'a", "lambda: 1",
        "9" * 5000 + "_0",
    ],
)  # fmt: skip
def test_what_is_no_value_makes_no_call_that_can_be_run(value: str) -> None:
    text = f"[plot(at={value})]"
    content, _, calls = read("llama4_pythonic", text, tool("plot", {}))
    for _, arguments in calls:
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)
    assert calls or content == text


DAY = {
    "$defs": {
        "day": {"enum": ["1", "2"]},
        "all": {"allOf": [{"$ref": "#/$defs/day"}]},
        "loop": {"$ref": "#/$defs/loop"},
    }
}
RAW = {
    "glm45": "<tool_call>plot<arg_key>at</arg_key><arg_value>{}</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=plot>\n<parameter=at>\n{}\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="plot"><parameter name="at">{}</parameter></invoke>',
    "gemma4": "<|tool_call>call:plot{{at:{}}}<tool_call|>",
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"$ref": "#/$defs/day"}, "1", "1"),
        ({"$ref": "#/$defs/all"}, "2", "2"),
        ({"allOf": [{"description": "x"}, {"type": "string"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/day"}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/day"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"$ref": "#/$defs/none"}, "1", 1),
        ({"$ref": "elsewhere"}, "1", 1),
        ({"type": "string"}, "true", "true"),
        ({"type": "integer"}, "12", 12),
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "int"}, "12", 12),
        ({"type": "bool"}, "true", True),
        ({"type": ["dict", "string"]}, "12", "12"),
        ({"type": "integer"}, "soon", "soon"),
        (True, "12", 12),
    ],
)
def test_raw_values_follow_their_schema(name: str, schema: Any, raw: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"at": schema}, **DAY}
    content, _, calls = read(name, RAW[name].format(raw), tool("plot", parameters))
    assert content is None and len(calls) == 1, (content, calls)
    found = json.loads(calls[0][1])["at"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", ["\n北京 &amp;\n", "null", "42", "", "a\nb"])
def test_mimos_values_are_verbatim(value: str) -> None:
    values = f"<parameter=at>{value}</parameter><parameter=n> 7 </parameter>"
    text = f"<tool_call><function=plot>{values}</function></tool_call>"
    known = tool("plot", {"type": "object", "properties": {"at": {}, "n": {"type": "integer"}}})
    content, _, calls = read("mimo", text, known)
    assert content is None and json.loads(calls[0][1]) == {"at": value, "n": 7}


def test_gemmas_nested_values_follow_their_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
            "at": {"allOf": [{"properties": {"code": {"type": "string"}}}]},
        },
    }
    text = "<|tool_call>call:plot{at:{code:12,days:[1,2],other:3,at:{code:7,n:7}},n:[4]}<tool_call|>"
    _, _, calls = read("gemma4", text, tool("plot", {"type": "object", "properties": {"at": schema}, **DAY}))
    assert json.loads(calls[0][1]) == {
        "at": {"code": "12", "days": ["1", "2"], "other": 3, "at": {"code": "7", "n": 7}},
        "n": [4],
    }


def test_following_a_schema_is_bounded() -> None:
    """References that lead back, that branch, and that are a long chain."""
    branching = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 40} for at in range(40)}
    chain = {f"c{at}": {"$ref": f"#/$defs/c{at + 1}"} for at in range(5000)}
    unions = {f"u{at}": {"anyOf": [{"$ref": f"#/$defs/u{at + 1}"}, {"type": "string"}] * 20} for at in range(40)}
    root = {"$defs": {**branching, **chain, **unions}}
    assert value_types({"$ref": "#/$defs/d0"}, root) == set()
    assert value_types({"$ref": "#/$defs/c0"}, root) == set()
    assert value_types({"$ref": "#/$defs/u0"}, root) == {"string"}


def _element(name: str, *inner: str) -> str:
    return f"]<]minimax[>[<{name}>{''.join(inner)}]<]minimax[>[</{name}>"


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ([_element("tags", _element("item", "a"), _element("item", "1"))], {"tags": ["a", "1"]}),
        ([_element("tags", '["a", "1"]')], {"tags": ["a", "1"]}),
        ([_element("tags"), _element("to"), _element("note")], {"tags": [], "to": {}, "note": ""}),
        ([_element("to", _element("zip", "018"), _element("n", " 7 "))], {"to": {"zip": "018", "n": 7}}),
        ([_element("any", _element("item", "1"), _element("item", "2"))], {"any": [1, 2]}),
        ([_element("free", _element("t", "x"), _element("t", "y"))], {"free": {"t": ["x", "y"]}}),
        ([_element("free", "hi ", _element("k", "v"), " there")], {"free": {"k": "v", "$text": "hi  there"}}),
        (["\n", _element("note", "\n a <b> & c\n"), "\n"], {"note": "\n a <b> & c\n"}),
        ([_element("free", _element("tool_call", _element("invoke", "v")))], {"free": {"tool_call": {"invoke": "v"}}}),
    ],
)
def test_nested_elements_follow_their_schema(inner: list[str], arguments: dict) -> None:
    properties = {
        "tags": {"type": "array", "items": {"type": "string"}},
        "to": {"$ref": "#/$defs/to"},
        "note": {"type": "string"},
        "any": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    }
    to = {"type": "object", "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    known = tool("plot", {"type": "object", "properties": properties, "$defs": {"to": to}})
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>\n{mark}<invoke name="plot">{"".join(inner)}{mark}</invoke>\n{mark}</tool_call>'
    content, _, calls = read("minimax_m3", text, known)
    assert content is None and [(name, json.loads(found)) for name, found in calls] == [("plot", arguments)]


@pytest.mark.parametrize("inner", ["junk", "]<]minimax[>[<note>a]<]minimax[>[</other>", "]<]minimax[>[<note>open"])
def test_elements_that_are_malformed_make_no_call(inner: str) -> None:
    text = f']<]minimax[>[<invoke name="plot">{inner}]<]minimax[>[</invoke>'
    assert read("minimax_m3", text, tool("plot", {})) == (text, None, [])


def test_elements_nest_only_so_deep() -> None:
    inner = "v"
    for _ in range(70):
        inner = _element("n", inner)
    text = f']<]minimax[>[<invoke name="plot">{inner}]<]minimax[>[</invoke>'
    assert read("minimax_m3", text, tool("plot", {})) == (text, None, [])
