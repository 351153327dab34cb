"""/v1/messages and /v1/messages/count_tokens: requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jaxllm.chat.conversation import MAX_TOOLS, TOOL_NAME
from jaxllm.requests.sampling import MAX_STOP_STRINGS
from jaxllm.serving.anthropic.content import MessageParam, TextBlockParam, Turn, bounded, check_turns, take_turns
from jaxllm.serving.http.request_model import CacheControl, KeepAliveFields, RequestModel, refuse
from jaxllm.wording import shown


class ToolParam(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"defer_loading", "input_examples"})

    type: Literal["custom"] | None = None
    """Anthropic's own tools, such as web_search_20250305, run on its servers only."""
    name: str = Field(pattern=TOOL_NAME)
    """What the model calls the tool by."""
    description: str | None = None
    """Tells the model what the tool is for."""
    input_schema: dict[str, Any]
    """JSON schema of the input, an object."""
    strict: bool | None = None
    """Make the input follow the schema to the letter whenever the model calls this tool."""
    allowed_callers: list[Literal["direct"]] | None = None
    """Only direct: there are no other callers."""
    eager_input_streaming: Literal[True] | None = None
    """Inputs are always streamed as they are generated."""
    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""

    @field_validator("input_schema")
    @classmethod
    def _object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "object":
            raise refuse(f"input_schema has the type {shown(value.get('type'))}; it must be 'object'")
        return value


def _is_custom(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and kind != "custom":
        raise refuse(f"tools of type {shown(kind)} are not supported by this server; 'custom' ones are", "type")
    return value


class ToolChoiceAuto(RequestModel):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False
    """One call an answer at most."""


class ToolChoiceAny(RequestModel):
    """Call some tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False
    """One call an answer at most."""


class ToolChoiceTool(RequestModel):
    """Call this tool."""

    type: Literal["tool"]
    name: str
    """Of a tool in tools."""
    disable_parallel_tool_use: bool = False
    """One call an answer at most."""


class ToolChoiceNone(RequestModel):
    type: Literal["none"]


ToolChoiceParam = Annotated[
    ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone, Field(discriminator="type")
]


class ThinkingEnabled(RequestModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)
    """Tokens of thinking after which it is ended; told to templates that know thinking_budget as well."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves the text of thinking blocks empty; otherwise it is shown as generated."""


class ThinkingAdaptive(RequestModel):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves the text of thinking blocks empty; otherwise it is shown as generated."""


class ThinkingDisabled(RequestModel):
    type: Literal["disabled"]


ThinkingParam = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class JSONOutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """What the text matches."""


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know a reasoning effort; for others it is a budget, as docs/tools.md has it."""
    format: JSONOutputFormat | None = None
    """The text follows this JSON schema to the letter."""


class Metadata(RequestModel):
    user_id: str | None = None
    """Accepted, without effect: nothing is stored."""


class CountTokensRequest(RequestModel):
    """What makes up a prompt."""

    unsupported: ClassVar[frozenset[str]] = frozenset({
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "speed", "user_profile_id",
        "workspace_id",
    })  # fmt: skip

    model: str | None = None
    """A name that /v1/models lists; by default the first."""
    messages: Annotated[list[MessageParam], BeforeValidator(bounded), Field(min_length=1)]
    """Messages in a row of one role are one turn; a last one of role assistant is continued."""
    system: str | list[TextBlockParam] | None = None
    """Put before the messages."""
    tools: list[Annotated[ToolParam, BeforeValidator(_is_custom)]] | None = Field(default=None, max_length=MAX_TOOLS)
    """Tools the model may call."""
    tool_choice: ToolChoiceParam | None = None
    """auto, any, a tool by name, or none."""
    thinking: ThinkingParam | None = None
    """By default the chat template's own default."""
    output_config: OutputConfig | None = None
    """How much the model thinks, and what its text matches."""
    cache_control: CacheControl | None = None
    """Accepted, without effect."""

    @model_validator(mode="after")
    def _conversation(self) -> CountTokensRequest:
        turns = self.turns
        check_turns(turns)
        thinks = isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)
        if thinks and self.continues_answer:
            raise refuse("thinking cannot be enabled when the last message is the assistant's", "thinking")
        effort = self.output_config.effort if self.output_config is not None else None
        if effort is not None and isinstance(self.thinking, ThinkingDisabled):
            raise refuse(f"output_config.effort is {effort!r}, but thinking is disabled", "output_config.effort")
        return self

    @model_validator(mode="after")
    def _tools(self) -> CountTokensRequest:
        names = [tool.name for tool in self.tools or ()]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise refuse(f"tools[{at}].name is {name!r}, which an earlier tool has; names must differ", "tools")
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceAny | ToolChoiceTool) and not names:
            raise refuse(f"tool_choice of type {choice.type!r} needs tools", "tool_choice")
        if isinstance(choice, ToolChoiceTool) and choice.name not in names:
            message = f"tool_choice.name is {shown(choice.name)}; tools has {', '.join(names)}"
            raise refuse(message, "tool_choice.name")
        return self

    @property
    def turns(self) -> list[Turn]:
        return take_turns(self.messages)

    @property
    def continues_answer(self) -> bool:
        return self.messages[-1].role == "assistant"


class MessagesRequest(CountTokensRequest, KeepAliveFields):
    path: ClassVar[str] = "/v1/messages"
    called_here: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop": "stop_sequences",
        "input": "messages", "prompt": "messages", "instructions": "system",
        "reasoning_effort": "output_config.effort", "response_format": "output_config.format",
        "user": "metadata.user_id",
    }  # fmt: skip

    max_tokens: int = Field(ge=1)
    """Upper bound on generated tokens, thinking included; what does not fit the context is cut off there."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    """Texts that end generation."""
    stream: bool = False
    """Send events while the message is generated."""
    temperature: float | None = None
    """As in a chat."""
    top_p: float | None = None
    """As in a chat."""
    top_k: int | None = None
    """As in a chat."""
    metadata: Metadata | None = None
    """Accepted, without effect: nothing is stored."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted, without effect: there is one tier."""

    @model_validator(mode="after")
    def _budget(self) -> MessagesRequest:
        thinking = self.thinking
        if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= self.max_tokens:
            raise refuse(
                f"thinking.budget_tokens is {thinking.budget_tokens}; it must be less than max_tokens, "
                f"which is {self.max_tokens}",
                "thinking.budget_tokens",
            )
        return self
