"""Arbitrary text, arbitrarily split, through every format."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.chat.events import OutputFormats, ToolFormat
from jaxllm.chat.formats import TOOL_FORMATS
from jaxllm.chat.parser import OutputParser
from jaxllm.text.reasoning import FUNCTIONARY, HARMONY, REASONING_FORMATS
from tests.serving.parsing.splitting import TOOLS, parse_pieces, parse_whole, seen, written

SCRAPS = [
    "get_weather", "get_time", "function<｜tool▁sep｜>", "<function=", "<parameter=city>", "</parameter>",
    "</function>", "call:", "```json", "```", "[ARGS]", '"name"', '"arguments"', '"function"', '"parameters"', '"id"',
    ": ", ", ", ";", "{", "}", "[", "]", '"', "\\", "\\u12", "\\ud83c", "\n", " ", "\t", "null", "true", "-1.5e3", "x",
    '{"city": "Paris"}', '{"name": "get_weather", "arguments": ', '{"name": "get_time", "parameters": {}}', ">", "{}",
    '"{\\"a\\": 1}"', "é🌸", '<invoke name="get_weather">', '<parameter name="city">', "</invoke>", "functions.", ":0",
    '<｜DSML｜invoke name="get_time">', '<｜DSML｜parameter name="days" string="false">', "</｜DSML｜parameter>",
    "Action: ", " to=functions.get_weather", "analysis", "final", "(", ")", "city=", "'a\\'b\\x41'", "True",
    '"tool_name"', '{"name": "get_news", "arguments": {"a": [1]}}', '{"name": "get_time", "arguments": "soon"}',
    '<param name="city">', "<![CDATA[", "]]></param>", "&lt;", "to=self<|message|>", "<atem:function_calls>",
    ' to=get_time<|message|><atem:invoke name="get_time">', "get_news(a=(1, 2))", '<invoke name="get_news">',
    "</think>", ">>>", "all", "a1b2c3d4e5", "<|begin|>assistant", "<|content|>",
]  # fmt: skip
formats = st.builds(OutputFormats, st.sampled_from(TOOL_FORMATS), st.sampled_from([None, *REASONING_FORMATS]))


@st.composite
def answers(draw: st.DrawFn) -> tuple[OutputFormats, str]:
    """Garbage made of what a format is made of."""
    chosen = draw(formats)
    begins = [syntax.marker for syntax in chosen.tools.syntaxes if syntax.marker]
    scraps = st.sampled_from([*SCRAPS, *chosen.markers, *begins])
    return chosen, "".join(draw(st.lists(st.one_of(scraps, st.text(max_size=3)), max_size=25)))


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def fresh(chosen: OutputFormats, in_reasoning: bool = False, parse_tools: bool = True) -> OutputParser:
    return OutputParser(chosen, tools=TOOLS if parse_tools else [], in_reasoning=in_reasoning)


@settings(max_examples=600, deadline=None)
@given(answers(), st.data(), st.booleans(), st.booleans())
def test_any_split_gives_what_the_whole_gives(answer, data, in_reasoning: bool, parse_tools: bool) -> None:
    chosen, text = answer
    whole = seen(parse_whole(fresh(chosen, in_reasoning, parse_tools), text))
    assert seen(parse_pieces(fresh(chosen, in_reasoning, parse_tools), data.draw(splits(text)))) == whole
    assert seen(parse_pieces(fresh(chosen, in_reasoning, parse_tools), text)) == whole


@settings(max_examples=300, deadline=None)
@given(answers())
def test_text_without_calls_or_reasoning_comes_back_whole(answer) -> None:
    chosen, text = answer
    content, reasoning, calls = seen(parse_whole(fresh(OutputFormats(chosen.tools, None)), text))
    if chosen.channels:
        return  # its markers are no text
    assert reasoning is None
    if not calls:
        assert (content or "") == text


@settings(max_examples=300, deadline=None)
@given(answers())
def test_events_are_in_order_and_complete(answer) -> None:
    chosen, text = answer
    parser = fresh(chosen)
    output = parse_whole(parser, text)
    assert parser.num_tool_calls == len(output.tool_calls)
    assert all(call.name in ("get_weather", "get_time") for call in output.tool_calls)
    assert len({call.id for call in output.tool_calls}) == len(output.tool_calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.booleans(), st.booleans(), st.data())
def test_json_arguments_come_back_to_the_letter(arguments, ascii_only: bool, as_string: bool, data) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    shown = json.dumps(written, ensure_ascii=ascii_only) if as_string else written
    text = f'<tool_call>{{"name": "get_time", "arguments": {shown}}}</tool_call>'
    chosen = OutputFormats(next(known for known in TOOL_FORMATS if known.name == "hermes"), None)
    output = parse_pieces(fresh(chosen), data.draw(splits(text)))
    assert seen(output) == (None, None, [("get_time", written)])


@st.composite
def mixed(draw: st.DrawFn) -> tuple[ToolFormat, list[tuple[str, str]]]:
    """Words, valid calls and calls of an unknown function, in the notation of one format."""
    apart = (HARMONY, FUNCTIONARY)  # whose calls begin where another message has ended
    known = draw(st.sampled_from([known for known in TOOL_FORMATS if known.name not in apart]))
    one = st.sampled_from(["words", "valid", "unknown"])
    texts = {
        "words": "It is 1 < 2.",
        "valid": written(known, ("get_weather", {"city": "Paris", "days": 2})),
        "unknown": written(known, ("get_news", {"city": "Rome"})),
    }
    return known, [(kind, texts[kind]) for kind in draw(st.lists(one, min_size=1, max_size=6))]


@settings(max_examples=400, deadline=None)
@given(mixed(), st.data())
def test_what_is_no_part_of_a_valid_call_is_content_and_nothing_is_given_twice(answer, data) -> None:
    known, parts = answer
    text = "\n".join(part for _, part in parts)
    output = parse_pieces(fresh(OutputFormats(known, None)), data.draw(splits(text)))
    content, _, calls = seen(output)
    valid = [("get_weather", {"city": "Paris", "days": 2}) for kind, _ in parts if kind == "valid"]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == valid
    assert "".join((content or "").split()) == "".join("".join(part for kind, part in parts if kind != "valid").split())
