"""context_management: old thinking and old results of tools leave the prompt, as the request says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.anthropic.blocks import Turn
from jaxllm.serving.anthropic.context import CLEARED, ClearThinking, ClearToolUses
from jaxllm.serving.anthropic.request import MessagesRequest
from tests.serving.anthropic.shared import ScriptedEngine
from tests.support.covers import covers

RESULTS = 5
LONG = "line " * 40


def session(results: int = RESULTS) -> list[Any]:
    """A question, calls of two tools in turn with long results, a second question, and one more call."""
    messages: list[Any] = [{"role": "user", "content": "First question"}]
    for number in range(results):
        if number == results - 1:
            messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "Second question"}]
        use = {"type": "tool_use", "id": "same", "name": ("Read", "Bash")[number % 2], "input": {"at": number}}
        thought = {"type": "thinking", "thinking": f"thought {number}"}
        result = {"type": "tool_result", "tool_use_id": "same", "content": f"result {number} {LONG}"}
        messages += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    return messages


def turns(results: int = RESULTS) -> list[Turn]:
    return MessagesRequest.model_validate({"max_tokens": 9, "messages": session(results)}).turns


def results_of(turns: Sequence[Turn]) -> list[str]:
    """Which results are there, by their numbers."""
    contents = [block.content for turn in turns for block in turn.blocks if block.type == "tool_result"]
    return [str(content).split(" ")[1] if content != CLEARED else "-" for content in contents]


def inputs_of(turns: Sequence[Turn]) -> list[Any]:
    return [block.input.get("at") for turn in turns for block in turn.blocks if block.type == "tool_use"]


def thoughts_of(turns: Sequence[Turn]) -> list[str]:
    return [block.thinking[-1] for turn in turns for block in turn.blocks if block.type == "thinking"]


@covers("ClearToolUses", "keep", "exclude_tools", "clear_tool_inputs")
@covers("ToolUses", "value")
@pytest.mark.parametrize(
    ("fields", "results", "inputs", "number"),
    [
        ({}, "--234", [0, 1, 2, 3, 4], 2),
        ({"keep": {"type": "tool_uses", "value": 1}}, "----4", [0, 1, 2, 3, 4], 4),
        ({"keep": {"type": "tool_uses", "value": 0}, "clear_tool_inputs": True}, "-----", [None] * 5, 5),
        ({"keep": {"type": "tool_uses", "value": 9}}, "01234", [0, 1, 2, 3, 4], 0),
        ({"exclude_tools": ["Read"]}, "0-234", [0, 1, 2, 3, 4], 1),
        ({"clear_tool_inputs": ["Bash"]}, "--234", [0, None, 2, 3, 4], 2),
    ],
)
def test_results_of_old_calls(fields: dict[str, Any], results: str, inputs: list[Any], number: int) -> None:
    before = turns()
    edit = ClearToolUses.model_validate({"type": "clear_tool_uses_20250919"} | fields)
    after, cleared = edit.applied(before)
    assert ("".join(results_of(after)), inputs_of(after), cleared) == (results, inputs, number)
    assert "".join(results_of(before)) == "01234", "the turns that were given stay as they are"


@covers("ClearThinking", "keep")
@covers("ThinkingTurns", "value")
@pytest.mark.parametrize(
    ("keep", "left", "number"),
    [
        (None, "4", 1),
        ({"type": "thinking_turns", "value": 2}, "01234", 0),
        ("all", "01234", 0),
        ({"type": "all"}, "01234", 0),
    ],
)
def test_thinking_of_old_turns(keep: Any, left: str, number: int) -> None:
    """All that is said between two questions is one turn."""
    edit = ClearThinking.model_validate({"type": "clear_thinking_20251015", "keep": keep})
    after, cleared = edit.applied(turns())
    assert ("".join(thoughts_of(after)), cleared) == (left, number)


@covers("CountTokensRequest", "context_management")
@covers("ContextManagement", "edits")
@covers("ClearToolUses", "trigger", "clear_at_least")
@covers("TokenNumber", "value")
@pytest.mark.parametrize(
    ("edits", "cleared"),
    [
        ([], None),
        ([{"trigger": {"type": "tool_uses", "value": 5}}], None),
        ([{"trigger": {"type": "tool_uses", "value": 4}}], 2),
        ([{"trigger": {"type": "input_tokens", "value": 1000}}], 2),
        ([{"trigger": {"type": "input_tokens", "value": 2000}}], None),
        ([{}], None),  # 100,000 tokens
        ([{"trigger": {"type": "tool_uses", "value": 4}, "clear_at_least": {"type": "input_tokens", "value": 300}}], 2),
        (
            [{"trigger": {"type": "tool_uses", "value": 4}, "clear_at_least": {"type": "input_tokens", "value": 400}}],
            None,
        ),
    ],
)
def test_the_model_does_not_read_what_was_cleared(
    client: TestClient, engine: ScriptedEngine, edits: list[dict[str, Any]], cleared: int | None
) -> None:
    edits = [{"type": "clear_tool_uses_20250919"} | edit for edit in edits]
    body: dict[str, Any] = {"messages": session()}
    whole = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    body["context_management"] = {"edits": edits}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    answer = client.post("/v1/messages", json=body | {"max_tokens": 5}).json()
    applied = answer["context_management"]["applied_edits"]
    assert engine.last_prompt.count(CLEARED) == (cleared or 0)
    assert ("result 0" in engine.last_prompt) == (cleared is None)
    assert counted["context_management"]["original_input_tokens"] == whole
    assert counted["input_tokens"] == len(engine.seen[-1][0])
    gone = {"type": edits[0]["type"], "cleared_tool_uses": cleared} if cleared else {}
    gone |= {"cleared_input_tokens": whole - counted["input_tokens"]} if cleared else {}
    assert applied == ([gone] if gone else [])


def test_a_stream_says_what_was_cleared_at_its_end(client: TestClient) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}
    body = {"max_tokens": 5, "messages": session(), "stream": True, "context_management": {"edits": [edit]}}
    text = client.post("/v1/messages", json=body).text
    assert '"cleared_tool_uses":2' in text.partition("event: message_delta")[2]
