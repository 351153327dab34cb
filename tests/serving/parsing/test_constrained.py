"""Answers whose constraint waits for the end of their reasoning: the parser ends it where the grammar does."""

from __future__ import annotations

import json
from itertools import product

import pytest

from jaxllm.chat.events import OutputFormats, ToolFormat
from jaxllm.chat.formats import TOOL_FORMATS
from jaxllm.chat.parser import OutputParser
from jaxllm.text.reasoning import CHANNELS, REASONING_FORMATS, ReasoningFormat
from tests.serving.parsing.splitting import TOOLS, parse_every_way, written

PLAIN_TOOLS = [known for known in TOOL_FORMATS if known.name not in CHANNELS]
PLAIN_REASONING = [known for known in REASONING_FORMATS if known.name not in CHANNELS]
HERMES = next(known for known in TOOL_FORMATS if known.name == "hermes")
THINK, HARMONY, MUSE = (
    next(known for known in REASONING_FORMATS if known.name == name) for name in ("think", "harmony", "muse")
)
PARIS = ("get_weather", {"city": "Paris"})
INVALID = ("get_weather", {"days": 2})
"""It lacks what the schema requires."""


def parsed(
    tools: ToolFormat | None, reasoning: ReasoningFormat, text: str, *, opened: bool, after: str
) -> tuple[str | None, str | None, list[tuple[str, dict]]]:
    content, thought, calls = parse_every_way(
        lambda: OutputParser(
            OutputFormats(tools, reasoning),
            tools=TOOLS if tools else [],
            in_reasoning=opened,
            constrained_after=after,
        ),
        text,
    )
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


each_beginning = pytest.mark.parametrize("opened", [True, False], ids=["opened", "opens"])


@each_beginning
@pytest.mark.parametrize(
    ("tools", "reasoning"),
    [*product(PLAIN_TOOLS, [THINK]), *product([HERMES], PLAIN_REASONING)],
    ids=lambda known: known.name,
)
def test_a_call_inside_open_reasoning_is_reasoning(tools: ToolFormat, reasoning: ReasoningFormat, opened: bool) -> None:
    early = written(tools, INVALID)
    after = reasoning.answer or reasoning.close
    text = f"{'' if opened else reasoning.open}Perhaps {early} or not.{after}\n{written(tools, PARIS)}"
    content, thought, calls = parsed(tools, reasoning, text, opened=opened, after=after)
    assert calls == [PARIS]
    if reasoning.in_content:
        assert content is not None and early in content and content.endswith(after)
    else:
        assert content is None and thought is not None and early.strip() in thought
    if tools.syntaxes[0].ends_reasoning:
        assert INVALID in parsed(tools, reasoning, text, opened=opened, after="")[2]


def test_reasoning_that_no_constraint_waits_for_ends_at_a_call() -> None:
    """The grammar has a say from the first token where whitespace comes before the mark."""
    text = f"\n<think>Perhaps {written(HERMES, PARIS)}"
    assert parsed(HERMES, THINK, text, opened=False, after=THINK.close) == (None, "Perhaps", [PARIS])


@each_beginning
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "unended"])
@pytest.mark.parametrize(
    ("reasoning", "commentary"),
    [(HARMONY, "<|channel|>commentary<|message|>"), (MUSE, " to=commentary<|message|>")],
    ids=["harmony", "muse"],
)
def test_messages_before_the_one_that_is_constrained_are_reasoning(
    reasoning: ReasoningFormat, commentary: str, ended: bool, opened: bool
) -> None:
    after = reasoning.answer
    end = f"{reasoning.close}<|start|>assistant"
    thought = f"{'' if opened else reasoning.open}Hm.{end}{commentary}I look it up."
    text = f"{thought}{end if ended else ''}{after}[1]"
    assert parsed(None, reasoning, text, opened=opened, after=after) == ("[1]", "Hm.\nI look it up.", [])
    for text in (f"{after}[1]", "[1]"):
        assert parsed(None, reasoning, text, opened=False, after=after) == ("[1]", None, [])
