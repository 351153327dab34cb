"""An answer as it grows: the message, and the events that stream it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from jaxllm.chat.answer import Piece
from jaxllm.engine.messages import TokenDelta
from jaxllm.serving.anthropic.blocks import BlockBuilder
from jaxllm.serving.anthropic.errors import error_response
from jaxllm.serving.anthropic.request import MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from jaxllm.serving.anthropic.response import (
    AnthropicMessage,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    ThinkingTokensDetails,
)
from jaxllm.serving.generation import Reply
from jaxllm.serving.http.answers import ignored_fields
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import ChunkWriter

_encode = msgspec.json.Encoder().encode


def encode_event(event: msgspec.Struct) -> bytes:
    """A server-sent event named as its type."""
    name = event.__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + _encode(event) + b"\n\n"


class MessageWriter(ChunkWriter[TokenDelta]):
    """Writes the events of one reply's stream; `message()` is what they amount to."""

    done = b""
    keep_alive = encode_event(Ping())

    def __init__(self, reply: Reply, body: MessagesRequest):
        self._reply = reply
        self._length_reason: StopReason = "max_tokens"
        if body.max_tokens > reply.max_tokens:
            self._length_reason = "model_context_window_exceeded"
        omitted = isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive) and body.thinking.display == "omitted"
        self._builder = BlockBuilder(show_thinking=not omitted)
        self._end: MessageEnd | None = None

    def encode(self, chunk: msgspec.Struct) -> bytes:
        return encode_event(chunk)

    def error(self, error: APIError) -> bytes:
        return encode_event(error_response(error))

    def first(self) -> Iterator[msgspec.Struct]:
        """How much of the prompt is cached is known with the first token only, and said at the end."""
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
        yield MessageDelta(self._end, self._usage())
        yield MessageStop()

    def message(self) -> AnthropicMessage:
        """The finished answer, whole."""
        return self._message(self._usage())

    def _message(self, usage: MessageUsage) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._reply.generation.id,
            model=self._reply.name,
            content=self._builder.blocks,
            stop_reason=self._end.stop_reason if self._end else None,
            stop_sequence=self._end.stop_sequence if self._end else None,
            usage=usage,
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
