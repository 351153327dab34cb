"""/v1/messages and /v1/messages/count_tokens: requests, and the messages and blocks that they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jaxllm.chat.conversation import MAX_TOOLS, TOOL_NAME, check_pieces
from jaxllm.requests.sampling import MAX_STOP_STRINGS
from jaxllm.serving.http.request_model import Cacheable, KeepAliveFields, ModelFields, RequestModel, refuse, refusing
from jaxllm.wording import shown

UNREADABLE_BLOCKS = frozenset({
    "bash_code_execution_tool_result", "browser_state", "code_execution_tool_result", "container_upload", "document",
    "image", "redacted_thinking", "search_result", "server_tool_use", "text_editor_code_execution_tool_result",
    "tool_reference", "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
})  # fmt: skip
"""Types of blocks that Anthropic's service reads and this one refuses by name."""


def _readable(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in UNREADABLE_BLOCKS:
        raise refuse(f"blocks of type {kind!r} are not supported by this server", "type")
    return value


class TextBlockParam(Cacheable):
    unsupported: ClassVar[frozenset[str]] = frozenset({"citations"})

    type: Literal["text"]
    text: str
    """The words."""


class ThinkingBlockParam(RequestModel):
    """The assistant's earlier reasoning, given to templates that show it."""

    type: Literal["thinking"]
    thinking: str
    """The reasoning."""
    signature: str | None = None
    """Accepted, without effect: it is not checked."""


class DirectCaller(RequestModel):
    type: Literal["direct"]


class ToolUseBlockParam(Cacheable):
    """A call that the assistant made; the next message must begin with its tool_result."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    """The name that its tool_result has for it."""
    name: str = Field(min_length=1)
    """Of the tool."""
    input: dict[str, Any]
    """The input that it was called with."""
    caller: DirectCaller | None = None
    """Only direct: there are no other callers."""


class ToolResultBlockParam(Cacheable):
    unsupported: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    """Of the call that it answers."""
    content: str | list[Annotated[TextBlockParam, BeforeValidator(_readable)]] | None = None
    """Text, or a list of text blocks."""
    is_error: bool = False
    """The model reads the content after "Error: "."""


Block = TextBlockParam | ThinkingBlockParam | ToolUseBlockParam | ToolResultBlockParam

_BLOCKS_OF_ROLE: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    """A system message among the others keeps its place."""
    content: (
        str
        | Annotated[
            list[Annotated[Annotated[Block, Field(discriminator="type")], BeforeValidator(_readable)]],
            Field(min_length=1),
        ]
    )
    """Text, or a list of blocks."""

    @model_validator(mode="after")
    def _blocks_of_role(self) -> MessageParam:
        allowed = _BLOCKS_OF_ROLE[self.role]
        for at, block in enumerate(self.blocks):
            if block.type not in allowed:
                message = (
                    f"messages of role {self.role!r} have blocks of type {' or '.join(allowed)}, not {block.type!r}"
                )
                raise refuse(message, f"content[{at}].type")
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlockParam(type="text", text=self.content)]
        return list(self.content)


def bounded(messages: Any) -> Any:
    """Counts messages and blocks before anything looks into them: checking them takes time, on the event loop."""
    if isinstance(messages, list):
        blocks = _contents(messages)
        with refusing():
            check_pieces(len(messages) + len(blocks) + len(_contents(blocks)))
    return messages


def _contents(owners: list[Any]) -> list[Any]:
    found = [owner["content"] for owner in owners if isinstance(owner, dict) and "content" in owner]
    return [part for content in found if isinstance(content, list) for part in content]


BlockKind = TypeVar("BlockKind", TextBlockParam, ThinkingBlockParam, ToolUseBlockParam, ToolResultBlockParam)


@dataclass
class Turn:
    """Messages in a row of one role, which are one turn; `first` is the position of the first of them."""

    role: str
    blocks: list[Block]
    first: int

    def of(self, kind: type[BlockKind]) -> list[BlockKind]:
        return [block for block in self.blocks if isinstance(block, kind)]


def check_turns(turns: Sequence[Turn]) -> None:
    """Refuse a conversation whose tool_use and tool_result blocks do not belong together, naming the message."""
    open_calls: dict[str, None] = {}
    for turn in turns:
        where = f"messages[{turn.first}]"
        results, calls = turn.of(ToolResultBlockParam), turn.of(ToolUseBlockParam)
        for block in results:
            if block.tool_use_id not in open_calls:
                awaited = f"awaiting one are {', '.join(open_calls)}" if open_calls else "no call awaits one"
                raise refuse(f"{where} has a tool_result for {shown(block.tool_use_id)}; {awaited}", where)
            del open_calls[block.tool_use_id]
        if open_calls:
            raise refuse(f"{where} must begin with tool_result blocks for {', '.join(open_calls)}", where)
        if any(not isinstance(block, ToolResultBlockParam) for block in turn.blocks[: len(results)]):
            raise refuse(f"{where} has other blocks before its tool_result blocks, which must come first", where)
        open_calls = {call.id: None for call in calls}
        if len(open_calls) < len(calls):
            raise refuse(f"{where} has several tool_use blocks with one id; ids must differ", where)
    if open_calls:
        raise refuse(
            f"messages ends with the calls {', '.join(open_calls)}; a user's message with their results must follow",
            "messages",
        )


class ToolParam(Cacheable):
    unsupported: ClassVar[frozenset[str]] = frozenset({"defer_loading", "input_examples"})

    type: Literal["custom"] | None = None
    """Anthropic's own tools, such as web_search_20250305, run on its servers only."""
    name: str = Field(pattern=TOOL_NAME)
    """The model's name for the tool."""
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
    type: Literal["auto", "any"]
    """auto lets the model decide; any makes it call some tool."""
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


ToolChoiceParam = Annotated[ToolChoiceAuto | ToolChoiceTool | ToolChoiceNone, Field(discriminator="type")]


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
    """The schema that the text matches."""


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know a reasoning effort; for others it is a budget, as docs/tools.md has it."""
    format: JSONOutputFormat | None = None
    """The text follows this JSON schema to the letter."""


class Metadata(RequestModel):
    user_id: str | None = None
    """Accepted, without effect: nothing is stored."""


class CountTokensRequest(ModelFields, Cacheable):
    """The fields that make up a prompt."""

    unsupported: ClassVar[frozenset[str]] = frozenset({
        "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "speed", "user_profile_id",
        "workspace_id",
    })  # fmt: skip

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
    """The amount of thinking, and the schema of the text."""

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
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise refuse(f"tool_choice of type {choice.type!r} needs tools", "tool_choice")
        if isinstance(choice, ToolChoiceTool) and choice.name not in names:
            message = f"tool_choice.name is {shown(choice.name)}; tools has {', '.join(names)}"
            raise refuse(message, "tool_choice.name")
        return self

    @property
    def turns(self) -> list[Turn]:
        turns: list[Turn] = []
        for at, message in enumerate(self.messages):
            if turns and turns[-1].role == message.role:
                turns[-1].blocks += message.blocks
            else:
                turns.append(Turn(message.role, message.blocks, at))
        return turns

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
