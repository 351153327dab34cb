"""Chat messages and how they become a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.serving.http.errors import shown
from jaxllm.serving.http.request_model import RequestModel, refuse
from jaxllm.serving.openai.tools import HistoryToolCall

RESERVED_TEMPLATE_NAMES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "self", "template",
    "tokenize", "tools",
})  # fmt: skip
"""Set by the server or by other fields, so chat_template_kwargs may not."""


MAX_PIECES = 8192
"""Messages, parts of their contents, and tool calls, together."""

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""What templates call the switch: Qwen, GLM and SmolLM the first, DeepSeek and Granite the second."""


class TextPart(RequestModel):
    type: Literal["text"]
    text: str
    """Parts of one message are joined by newlines."""


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str
    """Shown to the model as text."""


class Message(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"annotations", "audio", "function_call"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """developer is OpenAI's newer name for system and renders as it."""
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None = None
    """Text, or a list of parts; an assistant's message with tool_calls may have none."""
    name: str | None = None
    """Of the one who speaks, for templates that show it."""
    tool_calls: list[HistoryToolCall] | None = Field(default=None, min_length=1)
    """Calls that the assistant made; each must be answered by a tool message."""
    tool_call_id: str | None = None
    """Of a tool message: the call it answers."""
    refusal: str | None = None
    """What an assistant's message says instead of content."""
    reasoning_content: str | None = None
    """The assistant's earlier reasoning, given to templates that show it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""

    @model_validator(mode="after")
    def _fields_of_role(self) -> Message:
        assistant = self.role == "assistant"
        for name in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
            if getattr(self, name) is not None and not assistant:
                raise refuse(f"{name} belongs to messages of role 'assistant', not {self.role!r}", name)
        if (self.tool_call_id is not None) != (self.role == "tool"):
            problem = "is missing" if self.role == "tool" else f"does not belong to role {self.role!r}"
            raise refuse(f"tool_call_id {problem}; messages of role 'tool' have it, no others", "tool_call_id")
        empty = self.content is None and self.tool_calls is None and self.refusal is None
        if empty:
            raise refuse("content is required, except in an assistant's message with tool_calls", "content")
        return self

    def for_template(self) -> dict[str, Any]:
        """What a template sees: text parts joined by newlines, as vLLM does for templates that expect a string."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in text)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text if text is not None else self.refusal or "",
        }
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        return message | {name: value for name, value in optional.items() if value is not None}


def _bounded(messages: Any) -> Any:
    """Counts messages, parts and calls before anything looks into them: checking them takes time, on the event loop."""
    if not isinstance(messages, list):
        return messages
    count = len(messages)
    for message in messages:
        if isinstance(message, dict):
            count += sum(len(part) for part in map(message.get, ("content", "tool_calls")) if isinstance(part, list))
    if count > MAX_PIECES:
        raise refuse(f"messages has {count} messages, parts and calls; it may have {MAX_PIECES}")
    return messages


Messages = Annotated[list[Message], BeforeValidator(_bounded), Field(min_length=1)]


def check_history(messages: Sequence[Message]) -> None:
    """Refuse a conversation whose tool messages and tool calls do not belong together.

    Raises PydanticCustomError naming the message.
    """
    open_calls: dict[str, str] = {}
    for at, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                known = f"open calls are {', '.join(open_calls)}" if open_calls else "no call is open there"
                raise refuse(
                    f"messages[{at}].tool_call_id is {shown(message.tool_call_id)}; {known}",
                    f"messages[{at}].tool_call_id",
                )
            name = open_calls.pop(message.tool_call_id or "")
            message.name = message.name or name
        elif open_calls:
            raise refuse(
                f"messages[{at}] has role {message.role!r}, but the calls {', '.join(open_calls)} await tool messages",
                f"messages[{at}]",
            )
        for call in message.tool_calls or ():
            open_calls[call.id] = call.function.name


class Thinking(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]
    """adaptive is the same as enabled."""


class TemplateFields(RequestModel):
    """The fields that choose how `messages` are rendered."""

    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant turn; true unless continue_final_message is."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it."""
    chat_template: str | None = None
    """A Jinja template instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""
    documents: list[dict[str, Any]] | None = None
    """Given to the template, for those that know retrieval."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the template; none also turns its thinking off, anything else on."""
    thinking: bool | Thinking | None = None
    """Turns the template's thinking on or off: a boolean, or {"type": "enabled"} and {"type": "disabled"}."""

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        reserved = sorted(RESERVED_TEMPLATE_NAMES & (self.chat_template_kwargs or {}).keys())
        if reserved:
            message = (
                f"chat_template_kwargs has {reserved[0]!r}; it may not set {', '.join(sorted(RESERVED_TEMPLATE_NAMES))}"
            )
            raise refuse(message, "chat_template_kwargs")
        off = self.thinking is False or (isinstance(self.thinking, Thinking) and self.thinking.type == "disabled")
        if off and self.reasoning_effort not in (None, "none"):
            raise refuse(f"reasoning_effort is {self.reasoning_effort!r}, but thinking is off", "reasoning_effort")
        return self

    def template_arguments(self, server_template: str | None) -> dict[str, Any]:
        """Keyword arguments of Tokenizer.apply_chat_template."""
        documents = {"documents": self.documents} if self.documents is not None else {}
        return {
            "add_generation_prompt": self.generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template or server_template,
            **self._thinking_variables(),
            **(self.chat_template_kwargs or {}),
            **documents,
        }

    @property
    def generation_prompt(self) -> bool:
        """Whether the prompt ends with the start of an assistant turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def thinks(self) -> bool | None:
        """Whether the template was told to let the model think; None where nothing was said."""
        asked = self._thinking_variables() | (self.chat_template_kwargs or {})
        told = next((asked[name] for name in THINKING_VARIABLES if name in asked), None)
        return None if told is None else bool(told)

    def _thinking_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.thinking is not None:
            on = self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
        elif self.reasoning_effort is not None:
            on = self.reasoning_effort != "none"
        else:
            return {}
        return dict.fromkeys(THINKING_VARIABLES, on) | effort
