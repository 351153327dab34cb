"""The content blocks and messages that requests send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.chat.conversation import check_pieces
from jaxllm.serving.http.request_model import CacheControl, RequestModel, refuse, refusing
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


class TextBlockParam(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"citations"})

    type: Literal["text"]
    text: str
    """What is said."""
    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


class ThinkingBlockParam(RequestModel):
    """The assistant's earlier reasoning, given to templates that show it."""

    type: Literal["thinking"]
    thinking: str
    """The reasoning."""
    signature: str | None = None
    """Accepted, without effect: it is not checked."""


class DirectCaller(RequestModel):
    type: Literal["direct"]


class ToolUseBlockParam(RequestModel):
    """A call that the assistant made; the next message must begin with its tool_result."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    """What its tool_result names it by."""
    name: str = Field(min_length=1)
    """Of the tool."""
    input: dict[str, Any]
    """What it was called with."""
    caller: DirectCaller | None = None
    """Only direct: there are no other callers."""
    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


class ToolResultBlockParam(RequestModel):
    unsupported: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    """Of the call that it answers."""
    content: str | list[Annotated[TextBlockParam, BeforeValidator(_readable)]] | None = None
    """Text, or a list of text blocks."""
    is_error: bool = False
    """The model reads the content behind "Error: "."""
    cache_control: CacheControl | None = None
    """Accepted, without effect: prefixes are cached by themselves."""


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


@dataclass
class Turn:
    """Messages in a row of one role, which are one turn; `first` is the position of the first of them."""

    role: str
    blocks: list[Block]
    first: int

    @property
    def texts(self) -> list[str]:
        return [block.text for block in self.blocks if isinstance(block, TextBlockParam)]

    @property
    def thoughts(self) -> list[str]:
        return [block.thinking for block in self.blocks if isinstance(block, ThinkingBlockParam)]

    @property
    def calls(self) -> list[ToolUseBlockParam]:
        return [block for block in self.blocks if isinstance(block, ToolUseBlockParam)]

    @property
    def results(self) -> list[ToolResultBlockParam]:
        return [block for block in self.blocks if isinstance(block, ToolResultBlockParam)]


def take_turns(messages: Sequence[MessageParam]) -> list[Turn]:
    """Join messages in a row of one role, as Anthropic does."""
    turns: list[Turn] = []
    for at, message in enumerate(messages):
        if turns and turns[-1].role == message.role:
            turns[-1].blocks += message.blocks
        else:
            turns.append(Turn(message.role, message.blocks, at))
    return turns


def check_turns(turns: Sequence[Turn]) -> None:
    """Refuse a conversation whose tool_use and tool_result blocks do not belong together.

    Raises PydanticCustomError naming the message.
    """
    open_calls: dict[str, None] = {}
    for turn in turns:
        where = f"messages[{turn.first}]"
        for block in turn.results:
            if block.tool_use_id not in open_calls:
                awaited = f"awaiting one are {', '.join(open_calls)}" if open_calls else "no call awaits one"
                raise refuse(f"{where} has a tool_result for {shown(block.tool_use_id)}; {awaited}", where)
            del open_calls[block.tool_use_id]
        if open_calls:
            raise refuse(f"{where} must begin with tool_result blocks for {', '.join(open_calls)}", where)
        if any(not isinstance(block, ToolResultBlockParam) for block in turn.blocks[: len(turn.results)]):
            raise refuse(f"{where} has other blocks before its tool_result blocks, which must come first", where)
        open_calls = {call.id: None for call in turn.calls}
        if len(open_calls) < len(turn.calls):
            raise refuse(f"{where} has several tool_use blocks with one id; ids must differ", where)
    if open_calls:
        raise refuse(
            f"messages ends with the calls {', '.join(open_calls)}; a user's message with their results must follow",
            "messages",
        )
