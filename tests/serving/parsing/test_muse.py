"""Muse's messages: whom they are for, and calls only in those for tools."""

from __future__ import annotations

import pytest

from tests.serving.parsing.splitting import PARIS_CALL, parse_every_way, parser

INVOKE = '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>'
CALLS = f"<atem:function_calls>\n{INVOKE}\n</atem:function_calls>"
THOUGHT = " to=self<|message|>17*23 is 391.<|eom|>"


def read(text: str, *, in_reasoning: bool = False, parse_tools: bool = True) -> tuple:
    return parse_every_way(lambda: parser("muse", in_reasoning=in_reasoning, parse_tools=parse_tools), text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{THOUGHT}<|start|>assistant to=user<|message|>391.<|eot|>", ("391.", "17*23 is 391.", [])),
        ("<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi", ("Hi", "Hm.", [])),
        (" to=user<|message|>Hi", ("Hi", None, [])),
        ("Hi", ("Hi", None, [])),
        (f"{THOUGHT}<|start|>assistant to=get_weather<|message|>{CALLS}", (None, "17*23 is 391.", [PARIS_CALL])),
        (f" to=weather.tool<|message|>{CALLS}", (None, None, [PARIS_CALL])),
        (f" to=get_weather<|message|>{INVOKE}\n{INVOKE}<|eot|>", (None, None, [PARIS_CALL] * 2)),
        (
            f" to=commentary<|message|>I look.<|eom|><|start|>assistant to=get_weather<|message|>{CALLS}<|eom|>"
            "<|start|>assistant to=developer<|message|>Secret.<|eom|><|start|>assistant to=user<|message|>Done.<|eot|>",
            ("I look.\nDone.", None, [PARIS_CALL]),
        ),
        (f" to=self<|message|>I would write {CALLS}<|eom|>", (None, f"I would write {CALLS}", [])),
        (f" to=user<|message|>One writes {CALLS}", (f"One writes {CALLS}", None, [])),
        (f" to=self<|message|>Hm. to=get_weather<|message|>{CALLS}", (None, "Hm.", [PARIS_CALL])),
        (" to=self<|message|>Hm.to=user<|message|>Hi", ("Hi", "Hm.", [])),
        (" to=self<|message|>Send it to=me, a<|b", (None, "Send it to=me, a<|b", [])),
        (f" to=get_weather<|message|>{CALLS} and more", ("and more", None, [PARIS_CALL])),
    ],
)
def test_whom_messages_are_for(answer: str, expected: tuple) -> None:
    assert read(answer) == expected


def test_a_call_of_an_unknown_tool_is_content_with_its_header() -> None:
    unknown = CALLS.replace("get_weather", "weather.get")
    assert read(f" to=weather.get<|message|>{unknown}<|eot|>") == (f" to=weather.get<|message|>{unknown}", None, [])


def test_an_answer_that_begins_inside_a_thought() -> None:
    assert read("Hm.<|eom|><|start|>assistant to=user<|message|>Hi", in_reasoning=True) == ("Hi", "Hm.", [])


def test_calls_are_text_where_there_are_no_tools() -> None:
    text = f" to=get_weather<|message|>{CALLS}"
    assert read(text, parse_tools=False) == (text, None, [])
