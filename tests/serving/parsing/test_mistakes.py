"""What models write wrong: a valid call is read wherever only one reading is possible, and all else is content."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.chat.events import join_events
from jaxllm.chat.formats import detect_formats
from jaxllm.chat.parser import OutputParser
from tests.serving.parsing.splitting import parse_every_way, seen, tool


def _object(**properties: Any) -> dict:
    return {"type": "object", "properties": properties}


REFUND = tool("refund", _object(order={"type": "string"}))
BOOK = tool("book", _object(guests={"type": "integer"}, code={"type": "string"}))
PLOT = tool("plot", _object(at={}, ok={"type": "boolean"}))
A = '{"order": "A"}'
CALL = f'{{"name": "refund", "arguments": {A}}}'
UNKNOWN = '{"name": "cancel", "arguments": {"x": [1, "]"]}}'
BROKEN = '{"name": "refund", "arguments": 5}'
REFUNDS = [("refund", A)]
DSML = "<｜DSML｜tool_calls>"


def read(name: str, text: str, reasoning: str = "none", *, in_reasoning: bool = False, tools: tuple = ()) -> tuple:
    def fresh() -> OutputParser:
        chosen = detect_formats(None, name, reasoning)
        return OutputParser(chosen, tools=[REFUND, BOOK, PLOT, *tools], in_reasoning=in_reasoning)

    return parse_every_way(fresh, text)


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def deepseek(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def minimax(*calls: tuple[str, str]) -> str:
    inner = "".join(f'<invoke name="{name}">\n{parameters}</invoke>\n' for name, parameters in calls)
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


ORDER = '<parameter name="order">A</parameter>\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "refund", "arguments": "soon"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "refund", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": "soon", "name": "refund"}</tool_call>'),
        ("mistral", '[TOOL_CALLS]refund[ARGS]"soon"'),
        ("mistral", '[TOOL_CALLS] [{"name": "refund", "arguments": "soon"}]'),
        ("kimi_k2", kimi(("refund", '"soon"'))),
        ("deepseek_v31", deepseek(("refund", '"soon"'))),
        ("llama4_pythonic", '[refund("soon")]'),
        ("llama4_pythonic", "[refund(order=soon)]"),
        ("llama4_pythonic", "[refund(order=)]"),
        ("gemma4", "<|tool_call>call:refund[1]<tool_call|>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="refund"><parameter order>A</invoke></minimax:tool_call>'),
        ("glm45", "<tool_call>refund<arg_key>order</arg_key>A</tool_call>"),
        ("qwen3_coder", "<tool_call><function=refund><parameter=order</function></tool_call>"),
    ],
)
def test_a_call_without_arguments_that_are_an_object_is_content_and_no_call(name: str, text: str) -> None:
    assert read(name, text) == (text, None, [])


def test_arguments_that_are_no_object_are_content_in_harmony_too() -> None:
    text = ' to=functions.refund<|channel|>commentary <|constrain|>json<|message|>"soon"<|call|>'
    content, _, calls = read("harmony", text, "harmony")
    assert calls == [] and '"soon"' in content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral_v3", f"[TOOL_CALLS] [TOOL_CALLS] [{CALL}]"),
        ("mistral", f"[TOOL_CALLS][TOOL_CALLS][TOOL_CALLS]refund[ARGS]{A}"),
        ("hermes", f"<tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ("glm45", "<tool_call><tool_call>refund<arg_key>order</arg_key><arg_value>A</arg_value></tool_call>"),
    ],
)
def test_a_marker_written_twice_is_one(name: str, text: str) -> None:
    assert read(name, text) == (None, None, REFUNDS)


def test_a_call_is_found_in_what_looked_like_another() -> None:
    for between in (" [", " [{", "refund[ARGS]"):
        text = f"[TOOL_CALLS]{between}[TOOL_CALLS]refund[ARGS]{A}"
        assert read("mistral", text) == (f"[TOOL_CALLS]{between}".strip(), None, REFUNDS)


@pytest.mark.parametrize("other", [UNKNOWN, BROKEN])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", "<tool_call>", "</tool_call>"),
        ("mistral_v3", "[TOOL_CALLS]", ""),
        ("granite", "<|tool_call|>", ""),
        ("jamba", "<tool_calls>", "</tool_calls>"),
        ("json", "", ""),
        ("json", "```json\n", "```"),
        ("llama3_json", "<|python_tag|>", ""),
    ],
)
def test_a_valid_call_of_an_array_is_kept_beside_another(name: str, before: str, after: str, other: str) -> None:
    content, _, calls = read(name, f"{before}[{other}, {CALL}]{after}")
    assert (content, calls) == (f"{before}[{other}", REFUNDS)
    content, _, calls = read(name, f"{before}[{CALL}, {other}, {CALL}]{after}")
    assert (content, calls) == (f", {other}", REFUNDS * 2)
    only = f"{before}[{other}]{after}"
    assert read(name, only) == (only, None, [])


def test_a_valid_call_of_a_sequence_is_kept_beside_another() -> None:
    content, _, calls = read("llama3_json", f"<|python_tag|>{UNKNOWN}; {CALL}")
    assert (content, calls) == (f"<|python_tag|>{UNKNOWN}", REFUNDS)
    content, _, calls = read("llama4_pythonic", '[cancel(x=[1, "]"]), refund("x"), refund(order="A")]')
    assert (content, calls) == ('[cancel(x=[1, "]"]), refund("x")', REFUNDS)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("minimax_m2", minimax(("cancel", ORDER), ("refund", ORDER)), minimax(("refund", ORDER))),
        ("kimi_k2", kimi(("cancel", A), ("refund", A)), kimi(("refund", A))),
        ("kimi_k2", kimi(("refund", "soon"), ("refund", A)), kimi(("refund", A))),
        ("deepseek_v31", deepseek(("cancel", A), ("refund", A)), deepseek(("refund", A))),
    ],
)
def test_a_valid_call_of_a_section_is_kept_beside_another(name: str, bad: str, good: str) -> None:
    assert read(name, good) == (None, None, REFUNDS)
    content, _, calls = read(name, bad)
    assert calls == REFUNDS
    assert bad.startswith(content) and ("cancel" in content or "soon" in content)


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        (
            "glm45",
            "<tool_call>book<arg_key>guests</arg_key><arg_value>2</arg_value>oops</tool_call>",
            "oops</tool_call>",
            '{"guests": 2',
        ),
        (
            "qwen3_coder",
            "<tool_call><function=book><parameter=guests>2</parameter>oops</function></tool_call>",
            "oops</function></tool_call>",
            '{"guests": 2',
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="book"><parameter name="guests">2</parameter>oops</invoke>',
            "oops</invoke>",
            '{"guests": 2',
        ),
    ],
)
def test_a_closing_tag_that_was_read_is_not_given_as_content(
    name: str, text: str, content: str, arguments: str
) -> None:
    assert read(name, text) == (content, None, [("book", arguments)])


def test_what_stands_behind_the_arguments_in_a_calls_object_is_skipped() -> None:
    text = f'<tool_call>{{"name": "refund", "arguments": {A}, "reason": {{"a": "}}"}}}}</tool_call>'
    assert read("hermes", text) == (None, None, REFUNDS)


@pytest.mark.parametrize("body", ["", " ", "<|call|>", " <|call|>", "<|end|><|start|>assistant"])
def test_an_empty_body_in_harmony_is_a_call_without_arguments(body: str) -> None:
    text = f"<|channel|>commentary to=functions.refund <|constrain|>json<|message|>{body}"
    assert read("harmony", text, "harmony") == (None, None, [("refund", "{}")])


@pytest.mark.parametrize(
    ("name", "text"), [("kimi_k2", kimi(("refund", ""))), ("deepseek_v31", deepseek(("refund", "")))]
)
def test_no_arguments_before_a_closing_mark_are_an_empty_object(name: str, text: str) -> None:
    assert read(name, text) == (None, None, [("refund", "{}")])


def test_a_tool_that_has_harmonys_name_of_the_model() -> None:
    tools = (tool("assistant", _object()),)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert read("harmony", text, "harmony", tools=tools) == ("Hi", "Hm.", [])
    text = "<|channel|>commentary to=functions.assistant<|message|>{}<|call|>"
    assert read("harmony", text, "harmony", tools=tools) == (None, None, [("assistant", "{}")])


INSIDE = {
    "hermes": f"<tool_call>{CALL}</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=refund>\n<parameter=order>\nA\n</parameter>\n</function>\n</tool_call>",
    "kimi_k2": kimi(("refund", A)),
    "deepseek_v31": deepseek(("refund", A)),
    "deepseek_v4": f'{DSML}<｜DSML｜invoke name="refund"><｜DSML｜parameter name="order" string="true">A'
    f"</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
    "minimax_m2": minimax(("refund", ORDER)),
    "glm45": "<tool_call>refund<arg_key>order</arg_key><arg_value>A</arg_value></tool_call>",
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_a_call_inside_open_reasoning_ends_it(name: str, in_reasoning: bool) -> None:
    opened = "" if in_reasoning else "<think>"
    text = f"{opened}Hm.\n{INSIDE[name]}"
    assert read(name, text, "think", in_reasoning=in_reasoning) == (None, "Hm.", REFUNDS)
    closed = f"{text}\n</think>\n\nDone."
    assert read(name, closed, "think", in_reasoning=in_reasoning) == ("Done.", "Hm.", REFUNDS)


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_no_call_inside_reasoning_is_reasoning(name: str) -> None:
    text = INSIDE[name].replace("refund", "cancel")
    assert read(name, f"<think>Hm {text} yes</think>Hi", "think") == ("Hi", f"Hm {text} yes", [])


def test_inside_reasoning_a_marker_that_may_be_quoted_is_text() -> None:
    for name, text in (
        ("mistral", f"[TOOL_CALLS]refund[ARGS]{A}"),
        ("minimax_m2", f'<invoke name="refund">{ORDER}</invoke>'),
        ("qwen3_coder", "<function=refund><parameter=order>A</parameter></function>"),
    ):
        assert read(name, f"<think>Hm {text} yes</think>Hi", "think") == ("Hi", f"Hm {text} yes", [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="book">\n<parameter name="code">x</b>\n<parameter name="guests">2'
            "</parameter></invoke></minimax:tool_call>",
            [("book", '{"code": "x</b>", "guests": 2}')],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="book">\n<parameter name="code">x\n</invoke>\n</minimax:tool_call>',
            [("book", '{"code": "x"}')],
        ),
        (
            "minimax_m2",
            f'<minimax:tool_call><invoke name="refund">{ORDER}</minimax:tool_call>',
            REFUNDS,
        ),
        (
            "minimax_m2",
            f'<minimax:tool_call><invoke name="refund">{ORDER}<invoke name="refund">{ORDER}</invoke>'
            "</minimax:tool_call>",
            REFUNDS * 2,
        ),
        ("minimax_m2", f'<invoke name="refund">\n{ORDER}</invoke>', REFUNDS),
        ("minimax_m2", f'<invoke name="refund">\n{ORDER}</invoke></minimax:tool_call>', REFUNDS),
        (
            "deepseek_v4",
            '<｜DSML｜invoke name="book">\n<｜DSML｜parameter name="code" string="true">x '
            '<｜DSML｜parameter name="guests" string="false">2</｜DSML｜parameter>\n</｜DSML｜tool_calls>',
            [("book", '{"code": "x ", "guests": 2}')],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=refund>\n<parameter=order>\nA\n</parameter>\n</tool_call>",
            REFUNDS,
        ),
        ("qwen3_coder", "<function=refund>\n<parameter=order>\nA\n</function>\n</tool_call>", REFUNDS),
    ],
)
def test_a_missing_tag(name: str, text: str, calls: list) -> None:
    assert read(name, text) == (None, None, calls)


STEP = "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"


@pytest.mark.parametrize("space", ["", "\n"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minimax_m2", '<invoke name="refund">\n<parameter name="order">A{}</invoke>'),
        ("minimax_m2", '<minimax:tool_call><invoke name="refund">\n<parameter name="order">A{}</invoke>'),
        (
            "minimax_m2",
            f'<invoke name="refund">{ORDER}</invoke>\n<invoke name="refund"><parameter name="order">A{{}}</invoke>',
        ),
        ("dots", '<dots_function_call><invoke name="refund"><parameter name="order">A{}</invoke>'),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="refund">\n<｜DSML｜parameter name="order" string="true">A{}</｜DSML｜invoke>',
        ),
        ("step3", f'{STEP}<steptml:invoke name="refund"><steptml:parameter name="order">A{{}}</steptml:invoke>'),
        (
            "step3",
            f'{STEP}<steptml:invoke name="refund"><steptml:parameter name="order">A{{}}</steptml:invoke>'
            "<｜tool_calls_end｜>",
        ),
        ("muse", ' to=refund<|message|><atem:invoke name="refund"><atem:parameter name="order">A{}</atem:invoke>'),
        (
            "muse",
            ' to=refund<|message|><atem:invoke name="refund"><atem:parameter name="order">A{}</atem:invoke><|eom|>',
        ),
        ("glm45", "<tool_call>refund<arg_key>order</arg_key><arg_value>A{}</tool_call>"),
    ],
)
def test_a_values_closing_tag_is_missing_where_the_text_ends(name: str, text: str, space: str) -> None:
    found = REFUNDS * text.count('invoke name="refund"') or REFUNDS
    reasoning = "auto" if name == "muse" else "none"
    for behind in ("", "\n"):
        assert read(name, text.format(space) + behind, reasoning) == (None, None, found)


def test_where_max_tokens_cut_the_text_a_value_without_its_closing_tag_is_unfinished() -> None:
    text = '<invoke name="refund">\n<parameter name="order">A</invoke>'
    parser = OutputParser(detect_formats(None, "minimax_m2", "none"), tools=[REFUND], in_reasoning=False)
    events = [*parser.feed(text), *parser.finish(cut=True)]
    assert seen(join_events(events)) == (None, None, [("refund", '{"order": "A')])


def test_a_closing_tag_that_text_follows_is_part_of_a_value_without_its_own() -> None:
    _, _, calls = read("minimax_m2", '<invoke name="refund">\n<parameter name="order">A</invoke> and more')
    assert calls == [("refund", '{"order": "A</invoke> and more')]


def test_a_value_may_hold_tags_that_end_nothing_there() -> None:
    value = 'x</invoke> <parameter name="color">y</b> <invoke>'
    text = minimax(("refund", f'<parameter name="order">{value}</parameter>'))
    escaped = value.replace('"', '\\"')
    assert read("minimax_m2", text) == (None, None, [("refund", f'{{"order": "{escaped}"}}')])


@pytest.mark.parametrize("text", ["</think>Hi", "\n</think>\n\nHi", "<think>\n</think>\n</think>\nHi"])
def test_a_closing_mark_that_closes_nothing(text: str) -> None:
    assert read("hermes", text, "think") == ("Hi", None, [])
    call = f"<tool_call>{CALL}</tool_call>"
    assert read("hermes", f"{call}\n</think>\n\nHi", "think") == ("Hi", None, REFUNDS)
    assert read("hermes", f"One\n{call}\n Two </think>", "think") == ("One\n\n Two </think>", None, REFUNDS)
    assert read("hermes", "Say </think>", "think") == ("Say </think>", None, [])
    assert read("hermes", "</thin ice", "think") == ("</thin ice", None, [])
