"""Answers as models write them, and what clients get of them while they are written."""

from __future__ import annotations

import json
import sys

import pytest

from jaxllm.chat.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import OutputParser
from jaxllm.chat.source import Source
from tests.serving.parsing.splitting import (
    JSON_CALL,
    PARIS_CALL,
    TOOLS,
    parse_every_way,
    parse_pieces,
    parse_whole,
    parser,
    seen,
)


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('"{\\"city\\": \\"Paris\\"}"', '{"city": "Paris"}'),
        ('"{\\"city\\": \\"\\\\ud83c\\\\udf38\\"}"', '{"city": "\\ud83c\\udf38"}'),
        ('"{\\"city\\": \\"\\ud83c\\udf38\\"}"', '{"city": "🌸"}'),
        ('""', "{}"),
        ('{ "city" : "a\\"}{[" }', '{ "city" : "a\\"}{[" }'),
        ('{"city": "two\nlines"}', '{"city": "two\\nlines"}'),
        ('{"n": [-1.5e+3, 0, true, null, {}, []]}', '{"n": [-1.5e+3, 0, true, null, {}, []]}'),
    ],
)
def test_arguments_are_the_text_that_the_model_wrote(raw: str, arguments: str) -> None:
    output = parse_pieces(parser("hermes"), f'<tool_call>{{"name": "get_weather", "arguments": {raw}}}</tool_call>')
    assert seen(output) == (None, None, [("get_weather", arguments)])
    json.loads(arguments)


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weathers", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "description": "none"}</tool_call>',
        '<tool_call>{"name": "get_weather", "name": "get_time"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 01}, "name": "get_time"}</tool_call>',
        '<tool_call>{"name": "get_weather"',
        "<tool_call> oops </tool_call> \n",
        "<tool_call>",
        "<tool_ca",
        "a < b <tool_",
        '{"name": "get_weather", "arguments": {}}',
        " \n leading and trailing  \n",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(answer: str) -> None:
    assert seen(parse_whole(parser("hermes"), answer)) == (answer, None, [])
    assert seen(parse_pieces(parser("hermes"), answer)) == (answer, None, [])


@pytest.mark.parametrize(
    "answer", ['{"city": "Paris"}', 'Use {"name": "get_weather", "arguments": {}} for it.', "```py\nx\n```"]
)
def test_json_that_is_no_call_is_content(answer: str) -> None:
    assert seen(parse_pieces(parser("json"), answer)) == (answer, None, [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    output = parse_pieces(parser("hermes"), f"<tool_call>no <tool_call>{JSON_CALL}</tool_call>")
    assert seen(output) == ("<tool_call>no", None, [PARIS_CALL])


def test_arguments_that_break_end_there_and_the_rest_is_content() -> None:
    answer = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>'
    assert seen(parse_pieces(parser("hermes"), answer)) == ("}}</tool_call>", None, [("get_weather", '{"city": oops')])


def test_an_answer_cut_inside_a_call_leaves_arguments_that_no_client_can_read() -> None:
    output = parse_pieces(parser("hermes"), '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert seen(output) == (None, None, [("get_weather", '{"city": "Pa')])


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (f"Let me see.\n\n<tool_call>{JSON_CALL}</tool_call>\n", "Let me see."),
        (f"\n\n<tool_call>{JSON_CALL}</tool_call> \n <tool_call>{JSON_CALL}</tool_call>", None),
        (f"<tool_call>{JSON_CALL}</tool_call>\nDone. ", "Done. "),
        (f"One\n<tool_call>{JSON_CALL}</tool_call>\nTwo", "One\n\nTwo"),
    ],
)
def test_whitespace_around_calls(answer: str, content: str | None) -> None:
    assert parse_whole(parser("hermes"), answer).content == content
    assert parse_pieces(parser("hermes"), answer).content == content


@pytest.mark.parametrize(
    ("name", "answer", "in_reasoning", "expected"),
    [
        ("think", "<think>\nHm.\n\nYes.\n</think>\n\nHi", False, ("Hi", "Hm.\n\nYes.")),
        ("think", "\n<think></think>Hi\n", False, ("Hi\n", None)),
        ("think", "Hm.\n</think>\nHi", True, ("Hi", "Hm.")),
        ("think", "<think>Hm.</think>Hi", True, ("Hi", "Hm.")),
        ("think", "<think>Hm. ", False, (None, "Hm.")),
        ("think", "Hm. </thi", True, (None, "Hm. </thi")),
        ("think", "Say <think> and </think>.", False, ("Say <think> and </think>.", None)),
        ("think", "<thin ice", False, ("<thin ice", None)),
        ("deepseek_r1", "Hm.</think>Hi", True, ("Hi", "Hm.")),
        ("minimax_m2_append_think", "Hm.\n</think>\n\nHi\n", True, ("<think>Hm.\n</think>\n\nHi\n", None)),
        ("minimax_m2_append_think", "<think>Hm.</think>Hi", True, ("<think>Hm.</think>Hi", None)),
        ("minimax_m2_append_think", "\nHm. </thi", True, ("<think>\nHm. </thi", None)),
        ("minimax_m2_append_think", "", True, ("<think>", None)),
        ("minimax_m2_append_think", "Hi", False, ("Hi", None)),
        ("hy_v3_opensource", "Hm.</think:opensource>Hi", True, ("Hi", "Hm.")),
        ("hy_v3_opensource", "<think:opensource>Hm.</think></think:opensource>Hi", False, ("Hi", "Hm.</think>")),
        ("kimi_k2", "<think>Hm.</think>Hi", False, ("Hi", "Hm.")),
        ("mistral", "[THINK]Hm.[/THINK]Hi", False, ("Hi", "Hm.")),
        ("gemma4", "<|channel>thought\nHm.<channel|>Hi", False, ("Hi", "Hm.")),
        ("none", "<think>Hm.</think>Hi", True, ("<think>Hm.</think>Hi", None)),
    ],
)
@pytest.mark.parametrize("parse_tools", [True, False])
def test_reasoning(name: str, answer: str, in_reasoning: bool, expected: tuple, parse_tools: bool) -> None:
    def fresh() -> OutputParser:
        return parser("hermes", name, in_reasoning=in_reasoning, parse_tools=parse_tools)

    assert seen(parse_whole(fresh(), answer)) == (*expected, [])
    assert seen(parse_pieces(fresh(), answer)) == (*expected, [])


def test_calls_in_reasoning_are_reasoning_where_their_marker_may_be_quoted() -> None:
    output = parse_whole(parser("json"), f"<think>\n{JSON_CALL}\n</think>Hi")
    assert seen(output) == ("Hi", JSON_CALL, [])


def test_a_call_behind_reasoning_that_stays_in_the_content() -> None:
    call = '<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>'
    for thought in ("Hm.</think>\n\n", "Hm.\n"):
        output = parse_every_way(
            lambda: parser("minimax_m2", "minimax_m2_append_think", in_reasoning=True), thought + call
        )
        assert output == (f"<think>{thought.rstrip()}", None, [("get_time", "{}")])


@pytest.mark.parametrize("name", ["think", "minimax_m2_append_think"])
def test_in_reasoning_follows_the_text(name: str) -> None:
    fresh = parser("hermes", name)
    states = []
    for piece in ("<think>", "Hm.", "</think>", "Hi"):
        fresh.feed(piece)
        states.append(fresh.in_reasoning)
    assert states == [True, True, False, False]


def test_without_tools_calls_are_content() -> None:
    answer = f"<think>Hm.</think><tool_call>{JSON_CALL}</tool_call> "
    assert seen(parse_whole(parser("hermes", parse_tools=False), answer))[0] == f"<tool_call>{JSON_CALL}</tool_call> "


def test_a_call_streams_as_it_is_written() -> None:
    fresh = parser("hermes")
    assert fresh.feed("Let me see.\n<tool_") == [Content("Let me see.")]
    assert fresh.feed('call>{"name": "get_wea') == []
    assert fresh.feed('ther", "arguments": ') == []
    assert fresh.num_tool_calls == 0
    begun = fresh.feed('{"ci')
    assert isinstance(begun[0], ToolCall) and (begun[0].index, begun[0].name) == (0, "get_weather")
    assert begun[1:] == [ToolArguments(0, '{"ci')]
    assert fresh.feed('ty": "Par') == [ToolArguments(0, 'ty": "Par')]
    assert fresh.feed('is"}') == [ToolArguments(0, 'is"}')]
    assert fresh.feed("}\n</tool_call>\n") == []
    assert fresh.feed('<tool_call>{"name": "get_time", "arguments": {}')[1] == ToolArguments(1, "{}")
    assert fresh.finish() == []
    assert fresh.num_tool_calls == 2


def test_string_values_of_other_notations_stream_too() -> None:
    fresh = parser("glm45")
    fresh.feed("<tool_call>get_weather<arg_key>city</arg_key><arg_value>")
    assert fresh.feed('a "b') == [ToolArguments(0, 'a \\"b')]
    assert fresh.feed("c</arg_") == [ToolArguments(0, "c")]
    assert fresh.feed("d") == [ToolArguments(0, "</arg_d")]


def test_content_and_reasoning_are_not_held_back() -> None:
    fresh = parser("hermes", in_reasoning=True)
    assert fresh.feed("Hm, yes <b>") == [Reasoning("Hm, yes <b>")]
    assert fresh.feed("</think>a") == [Content("a")]
    assert fresh.feed(" < b <t> <") == [Content(" < b <t>")]
    assert fresh.feed("u>") == [Content(" <u>")]


def test_mistral_ids_are_nine_alphanumerics_and_ids_differ() -> None:
    answer = "[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{}"
    first, second = parse_whole(parser("mistral"), answer).tool_calls
    assert len(first.id) == 9 and first.id.isalnum() and first.id != second.id
    assert parse_whole(parser("json"), JSON_CALL).tool_calls[0].id.startswith("call_")


HOSTILE = {
    "markers": "<tool_cal",
    "whole markers": "<tool_call>",
    "braces": "{",
    "brackets": "[",
    "lines": "{\n",
    "whitespace": "\n",
    "nested functions": '{"function": ',
    "waiting arguments": '<tool_call>{"arguments": {"a": [',
    "strings": '<tool_call>{"name": "get_time", "arguments": {"a": "',
    "thoughts": "<thin",
    "fences": "`",
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("format_name", ["hermes", "json", "glm4", "gemma4"])
@pytest.mark.parametrize("by_character", [True, False])
def test_work_grows_with_the_text_and_no_faster(
    hostile: str, format_name: str, by_character: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0
    feed = Source.feed

    def counted_feed(source: Source, text: str) -> None:
        nonlocal copied
        feed(source, text)
        copied += len(source.text)

    monkeypatch.setattr(Source, "feed", counted_feed)

    def work(length: int) -> tuple[int, int]:
        nonlocal copied
        copied, calls = 0, 0
        text = (HOSTILE[hostile] * length)[:length]
        fresh = OutputParser(detect_formats(None, format_name, "think"), tools=TOOLS, in_reasoning=False)

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            parse_pieces(fresh, text if by_character else [text])
        finally:
            sys.setprofile(None)
        return calls, copied

    (small_calls, small_copied), (large_calls, large_copied) = work(1000), work(4000)
    assert large_calls < 5 * small_calls + 500
    assert large_copied < 5 * small_copied + 500


@pytest.mark.parametrize("parse_tools", [False, True])
def test_marks_around_the_text_are_left_out(parse_tools: bool) -> None:
    answer = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Paris, I <b>say</b>.<|END_RESPONSE|>"
    for split in (parse_whole, parse_pieces):
        fresh = parser("cohere_command", "cohere", parse_tools=parse_tools)
        assert seen(split(fresh, answer)) == ("Paris, I <b>say</b>.", "Hm.", [])


@pytest.mark.parametrize("parse_tools", [False, True])
@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "cohere",
            "<|START_THINKING|>A <co>fish: 🐟</co: 0:[1]><|END_THINKING|>\n<|START_RESPONSE|>It is <co>blue</co: "
            "0:[1,2],1:[3, 4]>.<|END_RESPONSE|>",
            ("It is blue.", "A fish: 🐟"),
        ),
        ("cohere", "Say </co: yes> and <b>", ("Say </co: yes> and <b>", None)),
        ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>", ("Hi.", "Hm.")),
        ("hunyuan_a13b", "<think>\n\n</think>\n\n<answer>Hi.\n</answer>\n", ("Hi.", None)),
        ("hunyuan_a13b", "Use <answer> and </answer> so.", ("Use <answer> and </answer> so.", None)),
        ("hunyuan_a13b", "<answer>\nUnfinished. ", ("Unfinished. ", None)),
        ("ernie45", "<think>Hm.\n</think>\n\n<response>\nHi.\n</response>\n", ("Hi.", "Hm.")),
        ("ernie45", "<think>Hm.\n</think>\nHi.", ("Hi.", "Hm.")),
        ("granite", "Here is my thought process:\nHm.\n\nHere is my response:\nHi.", ("Hi.", "Hm.")),
        ("granite", "Here's my thought process: Hm. Here's my response: Hi.", ("Hi.", "Hm.")),
        ("granite", "Here is my thoughtful answer.", ("Here is my thoughtful answer.", None)),
    ],
)
def test_marks_of_reasoning_that_are_words_tags_and_citations(
    name: str, answer: str, expected: tuple, parse_tools: bool
) -> None:
    content, reasoning, calls = parse_every_way(lambda: parser("hermes", name, parse_tools=parse_tools), answer)
    assert (content, reasoning, calls) == (*expected, [])


def test_kimis_calls_keep_the_ids_that_the_model_gave_them() -> None:
    call = "<|tool_call_begin|>functions.get_time:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    answer = (
        "<|tool_calls_section_begin|>" + call.format(3) + call.format(4) + call.format(4) + "<|tool_calls_section_end|>"
    )
    output = parse_pieces(parser("kimi_k2"), answer)
    first, second, repeated = (call.id for call in output.tool_calls)
    assert (first, second) == ("functions.get_time:3", "functions.get_time:4")
    assert repeated not in (first, second)
