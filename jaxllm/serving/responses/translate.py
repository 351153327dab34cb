"""A response's items and settings as a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.conversation import (
    Call,
    Conversation,
    Message,
    NamedTool,
    Rendering,
    Tool,
    ToolChoice,
    parse_arguments,
    thinking_variables,
)
from jaxllm.serving.generation_settings import GenerationSettings
from jaxllm.serving.openai.structured import JSONObjectFormat
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.request import (
    AllowedFunctions,
    ChosenFunction,
    PromptFields,
    ResponseRequest,
    TextSchemaFormat,
)


class Translation:
    """One request's way to a conversation, and the way back of the errors.

    `context` is all that is said, oldest first; its end, `own`, is what the request itself brings.
    """

    def __init__(self, body: PromptFields, context: Sequence[Item], own: Sequence[Item]):
        self._body = body
        self._context = context
        self._places = {id(item): at for at, item in enumerate(own)} if not isinstance(body.input, str) else {}
        self._origins: list[Item | None] = []
        """The item that each message begins with."""

    def conversation(self) -> Conversation:
        """Raises InvalidRequestError: see `name`."""
        items = [item for item in self._context if not _is_cut_off(item)]
        _check_calls(items)
        spoken = _messages(items)
        self._origins = [one.origin for one in spoken]
        messages = [one.message for one in spoken]
        if self._body.instructions is not None:
            self._origins.insert(0, None)
            messages.insert(0, Message("system", self._body.instructions))
        return Conversation(
            messages=messages,
            tools=_tools(self._body),
            tool_choice=_tool_choice(self._body),
            parallel_tool_calls=self._body.parallel_tool_calls,
            rendering=_rendering(self._body),
            structured_outputs=_constraint(self._body),
        )

    def name(self, place: Field) -> Field:
        """What the request calls a place of its Conversation or GenerationSettings."""
        match place.path:
            case ("messages", int(at), *rest):
                origin = self._places.get(id(self._origins[at]))
                return Field("input") if origin is None else Field("input", origin, *rest)
            case ("messages", *_):
                return Field("input")
            case ("max_tokens",):
                return Field("max_output_tokens")
            case ("structured_outputs",):
                return Field("text", "format")
            case _:
                return place


def generation_settings(body: ResponseRequest) -> GenerationSettings:
    return GenerationSettings(
        sampling=body.sampling(),
        max_tokens=body.max_output_tokens,
        logprobs=body.logprobs_count,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def turns(items: Sequence[Item]) -> list[int]:
    """The positions at which a conversation may be cut: where somebody other than the model begins to speak."""
    return [
        at
        for at, item in enumerate(items)
        if item["type"] == "message"
        and item["role"] == "user"
        and not (at and items[at - 1]["type"] == "message" and items[at - 1]["role"] == "user")
    ]


@dataclass
class _Spoken:
    """A message as it is put together from items."""

    message: Message
    origin: Item
    has_text: bool = False

    def begins_anew(self, kind: str) -> bool:
        """Whether an item of the model's starts a message of its own behind this one.

        Reasoning comes before text, text before calls; what follows calls that nobody has answered belongs to them.
        """
        if self.message.calls:
            return False
        if kind == "reasoning":
            return self.has_text or self.message.reasoning is not None
        return kind == "message" and self.has_text

    def join(self, item: Item) -> None:
        message = self.message
        match item["type"]:
            case "reasoning":
                parts = item.get("content") or item["summary"]
                if parts:
                    message.reasoning = _behind(message.reasoning, _text(parts))
            case "message":
                message.text = _behind(message.text, _text(item["content"]))
                self.has_text = True
            case "function_call":
                message.calls.append(
                    Call(item["call_id"], item["name"], parse_arguments(item["arguments"], Field("input")))
                )


def _messages(items: Sequence[Item]) -> list[_Spoken]:
    """Reasoning, text and calls that follow each other are one assistant's message; each output is a tool's message."""
    spoken: list[_Spoken] = []
    answer: _Spoken | None = None  # the assistant's message that the next item may join
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                message = Message("user" if item["role"] == "user" else "system", _text(item["content"]))
                spoken.append(_Spoken(message, item))
                answer = None
            case "function_call_output":
                output = item["output"]
                text = output if isinstance(output, str) else _text(output)
                spoken.append(_Spoken(Message("tool", text, call_id=item["call_id"]), item))
                answer = None
            case kind:
                if answer is None or answer.begins_anew(kind):
                    answer = _Spoken(Message("assistant"), item)
                    spoken.append(answer)
                answer.join(item)
    return spoken


def _is_cut_off(item: Item) -> bool:
    """Whether max_output_tokens ended a call in its middle: nobody can run it, and no template renders half of one."""
    return item["type"] == "function_call" and item["status"] == "incomplete"


def _behind(before: str | None, text: str) -> str:
    return f"{before}\n{text}" if before else text


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


def _tools(body: PromptFields) -> list[Tool]:
    tools = [tool.tool("tools", at) for at, tool in enumerate(body.tools)]
    match body.tool_choice:
        case "none":
            return []
        case AllowedFunctions(tools=allowed):
            names = [function.name for function in allowed]
            return [tool for tool in tools if tool.name in names]
        case _:
            return tools


def _tool_choice(body: PromptFields) -> ToolChoice:
    match body.tool_choice:
        case ChosenFunction(name=name):
            return NamedTool(name)
        case AllowedFunctions(mode=mode):
            return mode
        case "required":
            return "required"
        case _:
            return "auto"


def _rendering(body: PromptFields) -> Rendering:
    effort = body.reasoning.effort if body.reasoning is not None else None
    budget = body.max_thinking_tokens if isinstance(body, ResponseRequest) else None
    return Rendering(variables=thinking_variables(None, effort, budget) | (body.chat_template_kwargs or {}))


def _constraint(body: PromptFields) -> StructuredOutputs | None:
    match body.text.format if body.text is not None else None:
        case JSONObjectFormat():
            return StructuredOutputs(json_object=True)
        case TextSchemaFormat(schema_=schema):
            return StructuredOutputs(json=json.dumps(schema))
        case _:
            return None
