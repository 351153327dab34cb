"""Fields of Messages requests that no other test speaks of."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.chat.conversation import NamedTool, Tool
from jaxllm.serving.anthropic.request import MessagesRequest
from jaxllm.serving.anthropic.routes import conversation, messages
from tests.serving.sending import HELLO
from tests.support.covers import covers


def translated(**fields: Any) -> Any:
    return conversation(MessagesRequest.model_validate({"max_tokens": 9, "messages": HELLO} | fields))


@covers("ToolParam", "type", "name", "description", "input_schema", "allowed_callers", "eager_input_streaming")
@covers("ToolChoiceTool", "name", "disable_parallel_tool_use")
def test_a_tool() -> None:
    tool = {
        "type": "custom", "name": "f", "description": "Does f", "input_schema": {"type": "object"},
        "allowed_callers": ["direct", "code_execution_20250825"], "eager_input_streaming": False,
    }  # fmt: skip
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    chat = translated(tools=[tool], tool_choice=choice)
    assert chat.tools == [Tool("f", "Does f", {"type": "object"})]
    assert chat.tool_choice == NamedTool("f") and not chat.parallel_tool_calls
    for wrong in ({"type": "bash_20250124"}, {"allowed_callers": ["code_execution_20250825"]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            translated(tools=[tool | wrong])


@covers("ToolUseBlockParam", "caller")
def test_an_earlier_call_has_a_direct_caller() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    sent = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = MessagesRequest.model_validate({"max_tokens": 9, "messages": sent})
    assert [message.role for message in messages(body.system, body.turns)] == ["user", "assistant", "tool"]
    call["caller"] = {"type": "code_execution"}
    with pytest.raises(ValueError, match="caller"):
        MessagesRequest.model_validate({"max_tokens": 9, "messages": sent})
