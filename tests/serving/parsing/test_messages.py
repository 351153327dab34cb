"""Solar Open's and functionary's answers, made of messages, and SmolLM3's, whose Python code is content."""

from __future__ import annotations

import pytest

from jaxllm.chat.events import join_events
from tests.serving.parsing.splitting import JSON_CALL, PARIS, PARIS_CALL, parse_every_way, parse_whole, parser, seen

SOLAR_CALL = (
    "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather"
    f"<|tool_call:args|>{PARIS}<|tool_call:end|>"
)
NEXT = "<|end|><|begin|>assistant"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"<|think|>Let me think.{NEXT}<|content|>42.", ("42.", "Let me think.", [])),
        (f"<|think|>Let me think.{NEXT}{SOLAR_CALL}", (None, "Let me think.", [PARIS_CALL])),
        (f"<|think|>{NEXT}<|content|>Hi", ("Hi", None, [])),
        ("<|content|>Hello!", ("Hello!", None, [])),
        ("Hello!", ("Hello!", None, [])),
        (f"<|content|>Let me check.{NEXT}{SOLAR_CALL}<|calls|>", ("Let me check.", None, [PARIS_CALL])),
        (f"<|content|>Let me check.<|flush|>{SOLAR_CALL}", ("Let me check.", None, [PARIS_CALL])),
        (f"<|think|>Hm. {SOLAR_CALL}", (None, "Hm.", [PARIS_CALL])),
        ("<|think|>Hm", (None, "Hm", [])),
    ],
)
def test_solar_open(answer: str, expected: tuple) -> None:
    assert parse_every_way(lambda: parser("solar_open", "solar_open"), answer) == expected


def test_solar_open_keeps_the_ids_that_its_template_would_write() -> None:
    call = parse_whole(parser("solar_open", "solar_open"), SOLAR_CALL).tool_calls[0]
    assert call.id == "a1b2c3d4e5"
    call = parse_whole(parser("solar_open", "solar_open"), SOLAR_CALL.replace("a1b2c3d4e5", "")).tool_calls[0]
    assert len(call.id) == 10 and call.id.isalnum() and call.id.lower() == call.id


def test_solar_open_2() -> None:
    call = "<|tool_call:start|>get_time\n<|tool_call:end|>"
    answer = f"I should look.<|think:end|>It is\n\n{call}"
    read = lambda: parser("solar_open2", "solar_open2", in_reasoning=True)  # noqa: E731
    assert parse_every_way(read, answer) == ("It is", "I should look.", [("get_time", "{}")])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("all\nHello, world!\nWhat's up?", ("Hello, world!\nWhat's up?", None, [])),
        (">>>all\nHello", ("Hello", None, [])),
        (f"all\nI look.>>>get_weather\n{PARIS}", ("I look.", None, [PARIS_CALL])),
        (
            f"all\nI look.\n>>>get_weather\n{PARIS}>>>get_time\n{{}}",
            ("I look.", None, [PARIS_CALL, ("get_time", "{}")]),
        ),
        (f"get_weather\n{PARIS}>>>all\nDone.", ("Done.", None, [PARIS_CALL])),
        ("all\nIn Python:\n>>> get_time()\n>>>x", ("In Python:\n>>> get_time()\n>>>x", None, [])),
        ("Hello", ("Hello", None, [])),
        ("get_news\n{}", ("get_news\n{}", None, [])),
        ("get_time\nsoon", ("get_time\nsoon", None, [])),
        ("all\nYou call\nget_time\n{}", ("You call\nget_time\n{}", None, [])),
        ("get_time\n{} and more", ("and more", None, [("get_time", "{}")])),
        ("", (None, None, [])),
    ],
)
def test_functionary(answer: str, expected: tuple) -> None:
    assert parse_every_way(lambda: parser("functionary_v32"), answer) == expected


def test_functionary_without_tools() -> None:
    read = lambda: parser("functionary_v32", parse_tools=False)  # noqa: E731
    assert parse_every_way(read, f"all\nHi>>>get_weather\n{PARIS}") == (f"Hi>>>get_weather\n{PARIS}", None, [])


@pytest.mark.parametrize("size", [1, 100])
def test_functionary_cut_in_a_later_header(size: int) -> None:
    text = "all\nI look.>>>get_wea"
    fresh = parser("functionary_v32")
    events = [event for at in range(0, len(text), size) for event in fresh.feed(text[at : at + size])]
    assert seen(join_events([*events, *fresh.finish(cut=True)])) == ("I look.", None, [])


def test_smollm3s_python_code_is_content() -> None:
    code = '<code>\nresult = get_weather(city="Paris")\nprint(result)\n</code>'
    read = lambda: parser("hermes", "think")  # noqa: E731
    assert parse_every_way(read, f"<think>\nHm.\n</think>\n{code}") == (code, "Hm.", [])
    assert parse_every_way(read, f"{code}\n<tool_call>\n{JSON_CALL}\n</tool_call>") == (code, None, [PARIS_CALL])
