"""From a Messages request to the chat request that says the same."""

from __future__ import annotations

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxllm.serving.anthropic.content import ToolResultBlockParam, ToolUseBlockParam, Turn
from jaxllm.serving.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceParam,
    ToolChoiceTool,
    ToolParam,
)
from jaxllm.serving.openai.chat_request import ChatRequest

ERROR_PREFIX = "Error: "


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Without max_tokens, which only bounds here: the caller settles it when the length of the prompt is known.

    Raises RequestValidationError when a chat request cannot say it.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body), **_thinking(body)}
    if body.tools:
        fields |= {"tools": [_tool(tool) for tool in body.tools], **_tool_choice(body.tool_choice)}
    if body.continues_answer:
        fields["continue_final_message"] = True
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {"stop": body.stop_sequences, "stream": body.stream}
        fields |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems, body=fields) from None


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages as the chat route takes them: the system prompt first, each tool_result a message of its own."""
    messages = []
    if body.system:
        parts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        messages.append({"role": "system", "content": _content(parts)})
    for turn in body.turns:
        messages += [_answer(turn)] if turn.role == "assistant" else _request(turn)
    return messages


def _request(turn: Turn) -> list[dict[str, Any]]:
    """A turn of the user, or a system message: results of calls, then text."""
    messages = [_tool_message(block) for block in turn.results]
    return [*messages, {"role": turn.role, "content": _content(turn.texts)}] if turn.texts else messages


def _tool_message(block: ToolResultBlockParam) -> dict[str, Any]:
    texts = [part.text for part in block.content] if isinstance(block.content, list) else [block.content or ""]
    if block.is_error:
        texts = [ERROR_PREFIX + (texts[0] if texts else ""), *texts[1:]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(texts)}


def _answer(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    if turn.texts or not turn.calls:
        message["content"] = _content(turn.texts)
    if turn.calls:
        message["tool_calls"] = [_call(block) for block in turn.calls]
    if any(turn.thoughts):
        message["reasoning_content"] = "\n".join(turn.thoughts)
    return message


def _call(block: ToolUseBlockParam) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _tool(tool: ToolParam) -> dict[str, Any]:
    function = {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict,
    }  # fmt: skip
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoiceParam | None) -> dict[str, Any]:
    match choice:
        case None:
            return {}
        case ToolChoiceAuto():
            named: Any = "auto"
        case ToolChoiceAny():
            named = "required"
        case ToolChoiceTool():
            named = {"type": "function", "function": {"name": choice.name}}
        case _:
            return {"tool_choice": "none"}
    return {"tool_choice": named, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.thinking is not None:
        fields["thinking"] = not isinstance(body.thinking, ThinkingDisabled)
    if isinstance(body.thinking, ThinkingEnabled):
        fields["chat_template_kwargs"] = {"thinking_budget": body.thinking.budget_tokens}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields
