"""Messages of /v1/messages and the blocks of their contents, as turns in which calls and results belong together.

Calls have one id for clients and another for templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from jaxllm.chat.conversation import check_pieces
from jaxllm.chat.pictures import Picture, Sent
from jaxllm.errors import Field as Place
from jaxllm.serving.http.request_model import Cacheable, RequestModel, refuse, refusing
from jaxllm.wording import shown

UNREADABLE_BLOCKS = frozenset({
    "advisor_tool_result", "bash_code_execution_tool_result", "browser_state", "code_execution_tool_result",
    "compaction", "container_upload", "document", "fallback", "mcp_tool_listing", "mcp_tool_result",
    "mcp_tool_use", "search_result", "server_tool_use", "text_editor_code_execution_tool_result", "tool_addition",
    "tool_removal", "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
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


class ImageSource(RequestModel):
    type: Literal["base64", "url", "file"]
    """Which of data, url and file_id there is."""
    media_type: str | None = None
    """Accepted, without effect: the image's own first bytes say what it is."""
    data: str | None = None
    """The image in base64."""
    url: str | None = None
    """Where the server may fetch it: see docs/serving.md#images."""
    file_id: str | None = None
    """The id that /v1/files gave it."""

    @model_validator(mode="after")
    def _as_its_type(self) -> ImageSource:
        own = {"base64": "data", "url": "url", "file": "file_id"}[self.type]
        if not getattr(self, own) or sum(value is not None for value in (self.data, self.url, self.file_id)) > 1:
            raise refuse(f"a source of type {self.type!r} has {own}, and no other of data, url and file_id", own)
        return self


class ImageBlockParam(Cacheable):
    type: Literal["image"]
    source: ImageSource
    """The image in base64, where it is, or the id of an uploaded file."""
    _place: Place | None = PrivateAttr(None)

    @property
    def picture(self) -> Picture:
        text = self.source.data or self.source.url or self.source.file_id or ""
        return Picture(Sent(text, self.source.type == "file"), place=self._place)


class ThinkingBlockParam(RequestModel):
    """The assistant's earlier reasoning, given to templates that show it."""

    type: Literal["thinking"]
    thinking: str
    """The reasoning."""
    signature: str | None = None
    """Accepted, without effect: it is not checked."""


class RedactedThinkingBlockParam(RequestModel):
    """Earlier reasoning that only Anthropic's service can read; the model is not given it."""

    type: Literal["redacted_thinking"]
    data: str
    """Accepted, without effect: the reasoning, encrypted."""


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


class ToolReferenceParam(Cacheable):
    """A tool that a search has found: the model reads its definition here."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1)
    """Of a tool in tools, which may have defer_loading."""


ResultPart = Annotated[
    Annotated[TextBlockParam | ImageBlockParam | ToolReferenceParam, Field(discriminator="type")],
    BeforeValidator(_readable),
]


class ToolResultBlockParam(Cacheable):
    unsupported: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    """Of the call that it answers."""
    content: str | list[ResultPart] | None = None
    """Text, or a list of texts, images and references to tools."""
    is_error: bool = False
    """The model reads the content after "Error: "."""


Block = (
    TextBlockParam | ImageBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam | ToolUseBlockParam
    | ToolResultBlockParam
)  # fmt: skip

_BLOCKS_OF_ROLE: dict[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def place_images(blocks: Sequence[Any], *place: str | int) -> None:
    """Tell images where the request has them."""
    for at, block in enumerate(blocks):
        if isinstance(block, ImageBlockParam):
            block._place = Place(*place, "content", at)
        elif isinstance(block, ToolResultBlockParam) and isinstance(block.content, list):
            place_images(block.content, *place, "content", at)


class TurnConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Given to templates that know a reasoning effort; for others it is a budget, as docs/tools.md has it."""


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    """A system message among the others keeps its place."""
    content: (
        str
        | Annotated[
            list[Annotated[Annotated[Block, Field(discriminator="type")], BeforeValidator(_readable)]],
            Field(min_length=1),
        ]
        | None
    ) = None
    """Text, or a list of blocks; required but for a system message with an output_config."""
    clear_at: Literal["never", "next_user_message"] | None = None
    """Of a system message: next_user_message leaves it out once a user's message follows."""
    output_config: TurnConfig | None = None
    """Of a system message, for the rest of the turn: it wins over the request's own."""

    @model_validator(mode="after")
    def _blocks_of_role(self) -> MessageParam:
        for name in ("clear_at", "output_config"):
            if getattr(self, name) is not None and self.role != "system":
                raise refuse(f"{name} is for messages of role 'system', not {self.role!r}", name)
        if self.content is None and self.effort is None:
            raise refuse("content is required", "content")
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
        return list(self.content or ())

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort


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


PREFIX = "toolu_"
SPELLED = "toolu_id-"
"""Before an id that has other characters, each as a hyphen and its code: Kimi's, which its templates insist on."""
SHORT_ID = 9
"""Characters of the ids that Mistral's templates insist on."""
_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_CODE = re.compile(r"-([0-9a-f]{2})")


def tool_use_id(call_id: str) -> str:
    """The id of a call for the client.

    Worked example: `call_5f` becomes `toolu_5f`, Mistral's `aB3dE6gH9` becomes `toolu_aB3dE6gH9`, and Kimi's
    `functions.now:0` becomes `toolu_id-functions-2enow-3a0`.
    """
    if _OTHER.search(call_id):
        return SPELLED + _OTHER.sub(lambda match: f"-{ord(match.group()):02x}", call_id)
    return PREFIX + call_id.removeprefix("call_")


def template_call_id(sent: str) -> str:
    """The id for the template of a call that a client sends back: the model's own, but ours as they are."""
    if sent.startswith(SPELLED):
        return _CODE.sub(lambda match: chr(int(match.group(1), 16)), sent.removeprefix(SPELLED))
    bare = sent.removeprefix(PREFIX)
    return bare if len(bare) == SHORT_ID else sent
