"""A response's items and settings as a chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxllm.errors import InvalidRequestError
from jaxllm.serving.http.errors import APIError, to_api_error
from jaxllm.serving.openai.chat_request import ChatRequest
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.request import (
    PASSED_ON,
    AllowedFunctions,
    ChosenFunction,
    PromptFields,
    ResponseRequest,
    TextSchemaFormat,
)

CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}  # fmt: skip
"""What a chat request calls fields that have another name here."""

_chat_name = re.compile(rf"\b({'|'.join(CHAT_NAMES)})\b")


def chat_request(body: PromptFields, context: Sequence[Item]) -> ChatRequest:
    """The chat whose next message is the response; `context` is everything it is given, oldest first.

    Raises InvalidRequestError or APIError, which name fields as a chat request does: see `renamed`.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(context)}
    if body.instructions is not None:
        fields["messages"].insert(0, {"role": "system", "content": body.instructions})
    if body.tools:
        fields["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools]
        fields |= {"tool_choice": _tool_choice(body), "parallel_tool_calls": body.parallel_tool_calls}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponseRequest):
        fields |= {name: getattr(body, name) for name in PASSED_ON}
        fields |= {"max_completion_tokens": body.max_output_tokens, "logprobs": body.logprobs_count is not None}
        if body.logprobs_count is not None:
            fields["top_logprobs"] = body.logprobs_count
    else:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        located = [item | {"loc": ("body", *item["loc"])} for item in error.errors()]
        raise to_api_error(RequestValidationError(located, body=fields)) from None


def renamed(error: APIError | InvalidRequestError) -> APIError | InvalidRequestError:
    """The error with the names that fields have in a response instead of those in a chat."""
    if isinstance(error, InvalidRequestError):
        param = error.param and _rename(error.param)
        return InvalidRequestError(_rename(str(error)), param)
    told = error.body["error"]
    param = told["param"] and _rename(told["param"])
    return APIError(
        error.status, _rename(str(error)), type=str(told["type"]), param=param, code=told["code"], headers=error.headers
    )


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Reasoning, text and calls that follow each other are one assistant's message; each output is a tool's message.

    Calls that max_output_tokens cut off are left out: nobody can run them, and no template renders half of one.
    Raises InvalidRequestError when calls and outputs do not belong together.
    """
    items = [item for item in items if not (item["type"] == "function_call" and item["status"] == "incomplete")]
    _check_calls(items)
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the assistant's message that the next item may join
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _text(item["content"])})
                answer = None
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _text(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
                answer = None
            case kind:
                if answer is None or _begins_anew(answer, kind):
                    answer = {"role": "assistant"}
                    messages.append(answer)
                _join(answer, item)
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def turns(items: Sequence[Item]) -> list[int]:
    """The positions at which a conversation may be cut: where somebody other than the model begins to speak."""
    return [
        at
        for at, item in enumerate(items)
        if item["type"] == "message"
        and item["role"] == "user"
        and not (at and items[at - 1]["type"] == "message" and items[at - 1]["role"] == "user")
    ]


def _begins_anew(answer: dict[str, Any], kind: str) -> bool:
    """Reasoning comes before text, text before calls; what follows calls that nobody has answered belongs to them."""
    if "tool_calls" in answer:
        return False
    return len(answer) > 1 if kind == "reasoning" else kind == "message" and "content" in answer


def _join(answer: dict[str, Any], item: Item) -> None:
    match item["type"]:
        case "reasoning":
            parts = item.get("content") or item["summary"]
            if parts:
                _add(answer, "reasoning_content", _text(parts))
        case "message":
            _add(answer, "content", _text(item["content"]))
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)


def _add(answer: dict[str, Any], name: str, text: str) -> None:
    answer[name] = f"{answer[name]}\n{text}" if answer.get(name) else text


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def _check_calls(items: Sequence[Item]) -> None:
    waiting: set[str] = set()
    for item in items:
        match item["type"]:
            case "function_call":
                if item["call_id"] in waiting:
                    raise InvalidRequestError(f"input has two open function calls {item['call_id']!r}", "input")
                waiting.add(item["call_id"])
            case "function_call_output":
                if item["call_id"] not in waiting:
                    message = f"no function call with call_id {item['call_id']!r} comes before its output"
                    raise InvalidRequestError(message, "input")
                waiting.discard(item["call_id"])
            case "message" if waiting and item["role"] != "assistant":
                break
    if waiting:
        message = f"no output found for function call {', '.join(sorted(waiting))}; send function_call_output items"
        raise InvalidRequestError(message, "input")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def _tool_choice(body: PromptFields) -> str | dict[str, Any]:
    match body.tool_choice:
        case ChosenFunction(name=name):
            return _named(name)
        case AllowedFunctions(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_named(tool.name) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case str(mode):
            return mode


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _response_format(body: PromptFields) -> dict[str, Any]:
    assert body.text is not None and body.text.format is not None
    chosen = body.text.format
    if not isinstance(chosen, TextSchemaFormat):
        return {"type": chosen.type}
    schema = chosen.model_dump(by_alias=True, exclude_none=True)
    return {"type": schema.pop("type"), "json_schema": schema}


def _rename(text: str) -> str:
    return _chat_name.sub(lambda found: CHAT_NAMES[found.group()], text)
