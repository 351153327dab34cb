"""/v1/messages: an answer as it grows, its content blocks, and the events that stream them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from typing import Any, Literal

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType

from jaxllm.chat.events import Content, Event, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.parser import Piece
from jaxllm.engine.messages import TokenDelta
from jaxllm.serving.anthropic.blocks import tool_use_id
from jaxllm.serving.anthropic.request import MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from jaxllm.serving.generation import Reply
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import ChunkWriter, server_sent

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Prompt tokens are the sum of the first three; null where that is not known yet."""

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails | None = None


class ClearedThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015", kw_only=True):
    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(msgspec.Struct, tag_field="type", tag="clear_tool_uses_20250919", kw_only=True):
    cleared_tool_uses: int
    cleared_input_tokens: int


AppliedEdit = ClearedThinking | ClearedToolUses


class AppliedEdits(msgspec.Struct):
    applied_edits: list[AppliedEdit]


class NotCompared(msgspec.Struct, tag_field="type", tag="unavailable"):
    pass


class CacheDiagnostics(msgspec.Struct):
    cache_miss_reason: NotCompared


class AnthropicMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET
    """Where the request has one."""
    diagnostics: CacheDiagnostics | UnsetType = UNSET
    """Where the request names an earlier message."""
    warnings: list[str] | UnsetType = UNSET
    """With `unknown_fields: warn`, what was sent in vain."""


class OriginalTokens(msgspec.Struct):
    original_input_tokens: int


class TokenCount(msgspec.Struct):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET
    """Where the request has one: the tokens before it."""


class ErrorDetails(msgspec.Struct):
    error_code: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET
    """What clients go by, where they know how to do without."""


class AnthropicErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicError
    request_id: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockTextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJSONDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = BlockTextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


MessageStreamEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
    | AnthropicErrorResponse
)  # fmt: skip

OVERLOADED = 529

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", OVERLOADED: "overloaded_error",
}  # fmt: skip


def status_of(error: APIError) -> int:
    """Anthropic's clients know 529 for a server that cannot answer now, not 503."""
    return OVERLOADED if error.status == 503 else error.status


_DETAILS = {"thread": ErrorDetails("thread_unsupported_request")}
"""By the field that is refused: Anthropic's SDK then sends the whole conversation without it."""


def error_response(error: APIError, request_id: str) -> AnthropicErrorResponse:
    """The shape has no place for the field's name, so the message begins with it unless it says it anyway."""
    status, message, param = status_of(error), str(error), error.body["error"]["param"] or ""
    if param not in message:
        message = f"{param}: {error.reason}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return AnthropicErrorResponse(
        AnthropicError(type=kind, message=message, details=_DETAILS.get(param, UNSET)), request_id
    )


class MessageWriter(ChunkWriter[TokenDelta]):
    """Writes the events of one reply's stream; `message()` is what they amount to."""

    done = b""
    keep_alive = server_sent(Ping())

    def __init__(self, reply: Reply, body: MessagesRequest, applied: list[AppliedEdit] | None = None):
        """`applied` is what context_management took out, where the body has one."""
        self._reply = reply
        self._edits: AppliedEdits | UnsetType = UNSET if applied is None else AppliedEdits(applied)
        asks = body.diagnostics is not None and body.diagnostics.previous_message_id is not None
        self._diagnostics = CacheDiagnostics(NotCompared()) if asks else UNSET
        self._length_reason: StopReason = "max_tokens"
        if body.max_tokens > reply.max_tokens:
            self._length_reason = "model_context_window_exceeded"
        omitted = isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive) and body.thinking.display == "omitted"
        self._builder = BlockBuilder(show_thinking=not omitted)
        self._end: MessageEnd | None = None

    def encode(self, chunk: msgspec.Struct) -> bytes:
        return server_sent(chunk)

    def error(self, error: APIError) -> bytes:
        return server_sent(error_response(error, self._reply.generation.id))

    def first(self) -> Iterator[msgspec.Struct]:
        """The number of cached tokens is known with the first token only, and said at the end."""
        usage = MessageUsage(
            input_tokens=self._reply.usage().prompt_tokens,
            cache_creation_input_tokens=None,
            cache_read_input_tokens=None,
            output_tokens=0,
        )
        message = self._message(usage)
        message.warnings = ignored_fields.get() or UNSET
        yield MessageStart(message)
        yield Ping()

    def chunks(self, index: int, delta: TokenDelta) -> Iterator[msgspec.Struct]:
        piece = self._reply.parse(index, delta)
        yield from self._builder.add(piece.events)
        if piece.finish_reason is not None:
            yield from self._builder.finish()
            self._end = self._ending(piece)

    def last(self) -> Iterator[msgspec.Struct]:
        assert self._end is not None
        yield MessageDelta(self._end, self._usage(), self._edits)
        yield MessageStop()

    def message(self) -> AnthropicMessage:
        return self._message(self._usage())

    def _message(self, usage: MessageUsage) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._reply.generation.id,
            model=self._reply.name,
            content=self._builder.blocks,
            stop_reason=None if self._end is None else self._end.stop_reason,
            stop_sequence=None if self._end is None else self._end.stop_sequence,
            usage=usage,
            context_management=self._edits,
            diagnostics=self._diagnostics,
        )

    def _ending(self, piece: Piece) -> MessageEnd:
        stop_sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        if piece.finish_reason == "tool_calls" and not self._builder.has_unfinished_call:
            return MessageEnd(stop_reason="tool_use", stop_sequence=None)
        if piece.finish_reason == "length":
            return MessageEnd(stop_reason=self._length_reason, stop_sequence=None)
        reason: StopReason = "end_turn" if stop_sequence is None else "stop_sequence"
        return MessageEnd(stop_reason=reason, stop_sequence=stop_sequence)

    def _usage(self) -> MessageUsage:
        """Anthropic counts cached prompt tokens apart from the others."""
        usage = self._reply.usage()
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokensDetails(usage.reasoning_tokens),
        )


class BlockBuilder:
    """Collects `blocks` and says what a stream must send for each event; without `show_thinking` thinking stays empty.

    White space between reasoning, text and calls opens no block: clients may not send back blocks without words.
    """

    def __init__(self, *, show_thinking: bool = True):
        self.blocks: list[ContentBlock] = []
        self.has_unfinished_call = False
        """Some input is not what the model meant, and must not be acted on."""
        self._show_thinking = show_thinking
        self._open = False
        self._space = ""
        self._thinking: list[str] = []
        self._arguments: list[str] = []

    def add(self, events: Iterable[Event]) -> Iterator[MessageStreamEvent]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._add_text(text)
                case Reasoning(text):
                    yield from self._add_thinking(text)
                case ToolCall(_, id, name):
                    yield from self._start(ToolUseBlock(id=tool_use_id(id), name=name, input={}))
                case ToolArguments(_, text):
                    self._arguments.append(text)
                    yield self._delta(InputJSONDelta(text))

    def finish(self) -> Iterator[MessageStreamEvent]:
        if not self._open:
            return
        match self.blocks[-1]:
            case ThinkingBlock() as block:
                block.signature = signature("".join(self._thinking))
                yield self._delta(SignatureDelta(block.signature))
            case ToolUseBlock() as block:
                block.input, finished = parse_input("".join(self._arguments))
                self.has_unfinished_call |= not finished
        yield ContentBlockStop(len(self.blocks) - 1)
        self._open, self._thinking, self._arguments = False, [], []

    def _add_text(self, text: str) -> Iterator[MessageStreamEvent]:
        if not (self._open and isinstance(self.blocks[-1], TextBlock)):
            if not text.strip():
                self._space += text
                return
            text = self._space + text
            yield from self._start(TextBlock(""))
        block = self.blocks[-1]
        assert isinstance(block, TextBlock)
        block.text += text
        yield self._delta(BlockTextDelta(text))

    def _add_thinking(self, text: str) -> Iterator[MessageStreamEvent]:
        if not (self._open and isinstance(self.blocks[-1], ThinkingBlock)):
            yield from self._start(ThinkingBlock("", ""))
        self._thinking.append(text)
        if self._show_thinking:
            block = self.blocks[-1]
            assert isinstance(block, ThinkingBlock)
            block.thinking += text
            yield self._delta(ThinkingDelta(text))

    def _start(self, block: ContentBlock) -> Iterator[MessageStreamEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._open, self._space = True, ""
        yield ContentBlockStart(len(self.blocks) - 1, copy(block))

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(len(self.blocks) - 1, delta)


def signature(thinking: str) -> str:
    """The digest of a thinking block, which clients keep beside its text."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def parse_input(arguments: str) -> tuple[dict[str, Any], bool]:
    """The input of a call, and whether it is finished; of one that was cut off, what of it there is."""
    ways: tuple[Literal["off", "trailing-strings"], ...] = ("off", "trailing-strings")
    for way in ways:
        with suppress(ValueError):
            value = pydantic_core.from_json(arguments, allow_partial=way)
            if isinstance(value, dict):
                return value, way == "off"
    return {}, False
