"""The items and settings of a response as a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.chat import conversation
from jaxllm.chat.conversation import Call, Conversation, Message, Rendering, thinking_variables
from jaxllm.chat.custom import INPUT
from jaxllm.chat.pictures import Part, Picture, Sent
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.tools import ToolResult, as_data, full_name
from jaxllm.requests.structured_outputs import StructuredOutputs
from jaxllm.serving.generation import GenerationSettings
from jaxllm.serving.openai.structured import JSONObjectFormat
from jaxllm.serving.responses.items import CALLS, CLEAR, HOSTED_CALLS, HOSTED_OUTPUTS, OUTPUTS, UNSHOWN, Item
from jaxllm.serving.responses.request import PromptFields, ResponseRequest, TextSchemaFormat
from jaxllm.serving.responses.toolbox import Offer
from jaxllm.serving.responses.tools import told_name

COMPACTIONS = ("compaction", "compaction_summary")
SUMMARIZED = "This is a summary of the conversation before:"


@dataclass
class Spoken:
    """A message as it is put together from items."""

    message: Message
    origin: Item
    """The item that it begins with."""
    has_text: bool = False

    def begins_anew(self, kind: str, *, answered: bool) -> bool:
        """Say whether an item of this kind starts a message. Calls keep what follows them until they are `answered`."""
        if self.message.calls:
            return answered
        if kind == "reasoning":
            return self.has_text or self.message.reasoning is not None
        return kind == "message" and self.has_text

    def join(self, item: Item) -> None:
        message = self.message
        match item["type"]:
            case "reasoning":
                parts = item.get("content") or item["summary"]
                if parts:
                    message.reasoning = _after(message.reasoning, _text(parts))
            case "message":
                message.text = _after(message.text, _text(item["content"]))
                self.has_text = True
            case kind if kind in CALLS:
                message.calls.append(_call(item))
            case "mcp_call" | "mcp_approval_request":
                name = full_name(item["server_label"], item["name"])
                message.calls.append(Call(_call_id(item), name, conversation.known_arguments(item["arguments"])))


def spoken(items: Sequence[Item], special_tokens: Collection[str] = ()) -> list[Spoken]:
    """Reasoning, text and calls that follow each other are one assistant's message; each output is a tool's message.

    The calls that the server made bring their outputs along: [mcp_call A, mcp_call B] are assistant, tool, assistant,
    tool. Raises InvalidRequestError where calls of functions and their outputs do not belong together.
    """
    shown = _shown(items)
    _check_calls(shown)
    transcript = _Transcript(shown, special_tokens)
    for item in shown:
        transcript.add(item)
    transcript.end_answer()
    return transcript.spoken


def _shown(items: Sequence[Item]) -> list[Item]:
    """The items that the model is shown: not what a compaction stands for, and no call that an answer's end has cut."""
    last = max((at for at, item in enumerate(items) if item["type"] in COMPACTIONS), default=0)
    kept = [item for at, item in enumerate(items) if at >= last or (item["type"] == "message" and _asks(item))]
    answered = {item["call_id"] for item in kept if item["type"] in OUTPUTS}
    calls = {item["call_id"] for item in kept if item["type"] in CALLS}
    return [item for item in kept if not _left_out(item, calls, answered)]


def _asks(message: Item) -> bool:
    return message["role"] != "assistant"


def _left_out(item: Item, calls: Collection[str], answered: Collection[str]) -> bool:
    match item["type"]:
        case "mcp_call":
            return item["status"] == "incomplete"
        case kind if kind in HOSTED_OUTPUTS:
            return item["call_id"] not in calls
        case kind if kind in CALLS and item["call_id"] not in answered:
            return kind in HOSTED_CALLS or item["status"] == "incomplete" or _call(item).is_cut
        case kind:
            return kind in UNSHOWN


def _call(item: Item) -> Call:
    name, kind = told_name(item.get("namespace"), item.get("name", "")), item["type"]
    if kind == "function_call":
        return Call(item["call_id"], name, *conversation.history_arguments(item["arguments"], Field("input")))
    if kind == "custom_tool_call":
        return Call(item["call_id"], name, {INPUT: item["input"]})
    said = item.get(HOSTED_CALLS[kind])
    return Call(item["call_id"], kind.removesuffix("_call"), said if isinstance(said, dict) else {INPUT: said})


def turns(items: Sequence[Item]) -> list[int]:
    """The positions at which a conversation may be cut: where the user begins to speak."""
    return [
        at
        for at, item in enumerate(items)
        if item["type"] == "message"
        and item["role"] == "user"
        and not (at and items[at - 1]["type"] == "message" and items[at - 1]["role"] == "user")
    ]


class _Transcript:
    def __init__(self, items: Sequence[Item], special_tokens: Collection[str]):
        self.spoken: list[Spoken] = []
        self._special_tokens = special_tokens
        self._made = {item["approval_request_id"] for item in items if item["type"] == "mcp_call"}
        responses = [item for item in items if item["type"] == "mcp_approval_response"]
        self._approvals = {item["approval_request_id"]: item for item in responses}
        self._answer: Spoken | None = None
        """The assistant's message that the next item may join."""
        self._results: list[Spoken] = []
        """The results of calls in that message that the server made: they come after it."""

    def add(self, item: Item) -> None:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                role = "user" if item["role"] == "user" else "system"
                self._other(Message.of(role, map(_part, item["content"])), item)
            case kind if kind in HOSTED_OUTPUTS:
                output = item.get(HOSTED_OUTPUTS[kind])
                text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
                self._other(Message("tool", text, call_id=item["call_id"]), item)
            case kind if kind in OUTPUTS:
                output = item["output"]
                parts = [output] if isinstance(output, str) else map(_part, output)
                self._other(Message.of("tool", parts, call_id=item["call_id"]), item)
            case kind if kind in COMPACTIONS:
                said = item["encrypted_content"].removeprefix(CLEAR)
                self._other(Message("user", f"{SUMMARIZED}\n{said}"), item)
            case "mcp_call" | "mcp_approval_request":
                if (told := self._outcome(item)) is not None:
                    self._join(item)
                    seen: list[Part] = [told, *map(Picture, map(Sent, item.get("images") or ()))]
                    self._results.append(Spoken(Message.of("tool", seen, call_id=_call_id(item)), item))
            case "mcp_list_tools" | "mcp_approval_response":
                pass
            case _:
                self._join(item)

    def end_answer(self) -> None:
        self.spoken += self._results
        self._answer, self._results = None, []

    def _other(self, message: Message, item: Item) -> None:
        self.end_answer()
        self.spoken.append(Spoken(message, item))

    def _join(self, item: Item) -> None:
        answer = self._answer
        answered = answer is not None and len(self._results) == len(answer.message.calls)
        if answer is None or answer.begins_anew(item["type"], answered=answered):
            self.end_answer()
            self._answer = answer = Spoken(Message("assistant"), item)
            self.spoken.append(answer)
        answer.join(item)

    def _outcome(self, item: Item) -> str | None:
        """None where a later call tells the outcome."""
        if item["type"] == "mcp_call":
            error = item["error"]
            output = item["output"] or "" if error is None else _error_text(error)
            return as_data(full_name(item["server_label"], item["name"]), ToolResult(output), self._special_tokens)
        if item["id"] in self._made:
            return None
        answer = self._approvals.get(item["id"])
        if answer is None:
            return "The call was not made: the user has not approved it."
        if answer["approve"]:
            return "The call was approved, but not made."
        reason = answer["reason"]
        return "The call was not made: the user refused it." + (f" The reason given: {reason}" if reason else "")


def _error_text(error: dict[str, Any]) -> str:
    content = error.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return f"The tool failed: {' '.join(texts)}"
    return f"The tool failed: {error.get('message', 'it did not say why')}"


def _call_id(item: Item) -> str:
    """Nine letters and digits, which every template takes, where OpenAI's items have no id of the call."""
    return hashlib.sha256(item["id"].encode()).hexdigest()[:9]


def _after(before: str | None, text: str) -> str:
    return f"{before}\n{text}" if before else text


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def _part(part: dict[str, Any]) -> Part:
    if part["type"] != "input_image":
        return part["text"]
    return Picture(Sent(part["image_url"] or part["file_id"], part["image_url"] is None), part["detail"])


def _check_calls(items: Sequence[Item]) -> None:
    waiting: set[str] = set()
    for item in items:
        match item["type"]:
            case kind if kind in CALLS:
                if item["call_id"] in waiting:
                    raise InvalidRequestError(f"input has two open function calls {item['call_id']!r}", "input")
                waiting.add(item["call_id"])
            case kind if kind in OUTPUTS:
                if item["call_id"] not in waiting:
                    message = f"no function call with call_id {item['call_id']!r} comes before its output"
                    raise InvalidRequestError(message, "input")
                waiting.discard(item["call_id"])
            case "message" if waiting and item["role"] != "assistant":
                break
    if waiting:
        message = f"no output found for function call {', '.join(sorted(waiting))}; send function_call_output items"
        raise InvalidRequestError(message, "input")


class Translation:
    """One request's way to a conversation, and back for errors; `own` is the part of `context` that it brings."""

    def __init__(
        self,
        body: PromptFields,
        context: Sequence[Item],
        own: Sequence[Item],
        offer: Offer,
        special_tokens: Collection[str],
    ):
        self._body = body
        self._context = context
        self._offer = offer
        self._special_tokens = special_tokens
        self._places = {id(item): at for at, item in enumerate(own)} if not isinstance(body.input, str) else {}
        self._origins: list[Item | None] = []
        """The item that each message begins with."""

    def conversation(self) -> Conversation:
        """Raises InvalidRequestError: see `name`."""
        body, said = self._body, spoken(self._context, self._special_tokens)
        self._origins = [one.origin for one in said]
        messages = [one.message for one in said]
        if body.instructions is not None:
            self._origins.insert(0, None)
            messages.insert(0, Message("system", body.instructions))
        effort = body.reasoning.effort if body.reasoning is not None else None
        budget = body.max_thinking_tokens if isinstance(body, ResponseRequest) else None
        verbosity = {"verbosity": body.text.verbosity} if body.text is not None and body.text.verbosity else {}
        return Conversation(
            messages=messages,
            tools=self._offer.tools,
            tool_choice=self._offer.choice,
            parallel_tool_calls=body.parallel_tool_calls,
            rendering=Rendering(
                variables=thinking_variables(None, effort, budget) | verbosity | (body.chat_template_kwargs or {})
            ),
            structured_outputs=_constraint(body),
        )

    def name(self, place: Field) -> Field:
        """The request's name for a place of its Conversation or GenerationSettings."""
        match place.path:
            case ("messages", int(at), *rest):
                item = self._origins[at]
                if item is not None and item["type"] in OUTPUTS:
                    rest = ["output" if part == "content" else part for part in rest]
                origin = self._places.get(id(item))
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


def _constraint(body: PromptFields) -> StructuredOutputs | None:
    match body.text.format if body.text is not None else None:
        case JSONObjectFormat():
            return StructuredOutputs(json_object=True)
        case TextSchemaFormat(schema_=schema):
            return StructuredOutputs(json=json.dumps(schema))
        case _:
            return None
