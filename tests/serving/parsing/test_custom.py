"""Custom tools: grammars of their inputs in every notation of calls, in real llguidance, and inputs read back."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from jaxllm.chat.constraint import answer_constraint
from jaxllm.chat.conversation import Conversation, Message, Rendering, Tool, custom_tool
from jaxllm.chat.custom import InputReader, TextInput
from jaxllm.chat.events import OutputFormats, ToolFormat
from jaxllm.chat.formats import TOOL_FORMATS
from jaxllm.chat.parser import AnswerReader, OutputParser
from jaxllm.engine.messages import TokenDelta
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.structured_outputs import compile_grammar, new_matcher

llguidance = pytest.importorskip("llguidance")

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+ | "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
NESTED = 'start: value\nvalue: "(" value? ")" | /[^()]/ // recursive'
TEXTS: dict[TextInput, tuple[str, str]] = {
    TextInput("lark", PATCH): (
        '*** Begin Patch\n*** Add File: a "b" \\ c.py\n+x = "é"\\n\t</p>\n*** Delete File: n\n*** End Patch\n',
        "*** Begin Patch\n*** Move File: a\n*** End Patch\n",
    ),
    TextInput("lark", NESTED): ('(("))', "((a)"),
    TextInput("lark", 'start: A+\nA: "a" | "\\n"\n%ignore " "'): ("a a\n", "a b"),
    TextInput("regex", r'^\d{2}/"[a-z\s]+"$'): ('12/"a b\n"', '12/"A"'),
}
"""Of each grammar a text that matches, and one that does not."""


@cache
def vocabulary() -> Any:
    from jaxllm.requests.structured_outputs import _vocabulary

    return _vocabulary(9)


def allows(grammar: str, text: str) -> bool:
    matcher, tokens = new_matcher(vocabulary(), grammar), vocabulary()
    whole = all(matcher.consume_token(tokens.tokenize_bytes(bytes([byte]))[0]) for byte in text.encode())
    return whole and matcher.is_accepting()


def arguments(known: ToolFormat, text: str) -> str:
    """The input as a model writes it in this notation."""
    match known.arguments:
        case "json":
            return json.dumps({"input": text}, ensure_ascii=False)
        case "gemma":
            return f"{{input:{known.quote}{text}{known.quote}}}"
        case "pythonic":
            return f"input={json.dumps(text, ensure_ascii=False)}"
        case tags:
            between, around = tags.between if tags.exact else "\n", tags.literal or ("", "")
            opening = "\n".join(tags.open) if not tags.exact else between.join(tags.open)
            filled = opening.replace("{string}", "true").replace("{type}", "string")
            written = f"{filled}{around[0]}{text}{around[1]}{tags.close}{between}".replace("{key}", "input")
            return written if tags.exact else f"\n{written}"


def call(known: ToolFormat, text: str) -> str:
    around = known.written
    return around.start + known.head("patch") + arguments(known, text) + around.end + around.stop


def asked(text_input: TextInput) -> list[Tool]:
    return [custom_tool("patch", "Changes files", text_input, Field("tools", 0, "format", "definition"))]


def conversation(tools: list[Tool]) -> Conversation:
    thoughtless = Rendering(variables={"enable_thinking": False})
    return Conversation(messages=[Message("user")], tools=tools, tool_choice="required", rendering=thoughtless)


@pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
def test_the_grammar_of_an_input_holds_in_every_notation(known: ToolFormat) -> None:
    for text_input, (good, bad) in TEXTS.items():
        tools, formats = asked(text_input), OutputFormats(known, None)
        constraint = answer_constraint(conversation(tools), formats, "", in_reasoning=False, special_tokens={})
        assert constraint is not None
        grammar = compile_grammar(constraint)
        assert allows(grammar, call(known, good)) and not allows(grammar, call(known, bad)), text_input


@pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
def test_an_input_comes_back_as_text_however_it_is_split(known: ToolFormat) -> None:
    text = '*** Begin Patch\n+x = "é\\n" 🦆\t1\n*** End Patch'
    tools = asked(TextInput())
    for width in (1, 3, 1000):
        parser = OutputParser(OutputFormats(known, None), tools=tools, in_reasoning=False)
        reader = AnswerReader(conversation(tools), [parser])
        said = call(known, text)
        pieces = [said[at : at + width] for at in range(0, len(said), width)]
        ends = [None] * (len(pieces) - 1) + ["stop"]
        deltas = [TokenDelta(request_id="r", text=t, finish_reason=end) for t, end in zip(pieces, ends, strict=True)]
        answer, finish_reason = reader.whole(0, deltas)
        assert [(one.name, one.arguments) for one in answer.tool_calls] == [("patch", text)]
        assert finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"input": "a\\n\\u00e9\\ud83e\\udd86"}', "a\né🦆"),
        ('{ "input" : "a", "more": 1}', "a"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "\\ud83eA\\udd86"}', "\ufffdA\ufffd"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"path": "a", "input": "b"}', '{"path": "a", "input": "b"}'),
        ("{}", "{}"),
    ],
)
def test_inputs_are_read_out_of_arguments(sent: str, read: str) -> None:
    whole, single = InputReader(0), InputReader(0)
    assert whole.feed(sent) + whole.rest() == read
    assert "".join(map(single.feed, sent)) + single.rest() == read


@pytest.mark.parametrize(
    ("text_input", "told"),
    [
        (TextInput("lark", "start: other"), "cannot be enforced"),
        (TextInput("regex", "(a"), "cannot be enforced"),
        (TextInput("lark", 'start: %json {"type": "object"}'), "%json is not available"),
        (TextInput("lark", 'start: "\\n"i'), "ignores case"),
        (TextInput("regex", r"[\p{L}]+"), r"[\p{L}] is not available"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(text_input: TextInput, told: str) -> None:
    known = next(known for known in TOOL_FORMATS if known.name == "hermes")
    formats = OutputFormats(known, None)
    with pytest.raises(InvalidRequestError) as caught:
        answer_constraint(conversation(asked(text_input)), formats, "", in_reasoning=False, special_tokens={})
    assert told in str(caught.value) and (caught.value.param or "").startswith("tools")
