"""A response as it is filled, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import UNSET

from jaxllm.chat.answer import Piece
from jaxllm.mcp.tools import ToolResult
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.openai.logprobs import TokenBytes
from jaxllm.serving.openai.timings import timings
from jaxllm.serving.request_metrics import Phases, Usage
from jaxllm.serving.responses.answer_writer import AnswerWriter, OutputItems
from jaxllm.serving.responses.events import (
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    McpCallCompleted,
    McpCallFailed,
    McpListToolsCompleted,
    McpListToolsFailed,
    McpListToolsInProgress,
    Queued,
    ResponseEvent,
    StreamError,
)
from jaxllm.serving.responses.items import Item, new_id
from jaxllm.serving.responses.objects import (
    STOPPED,
    IncompleteDetails,
    InputTokensDetails,
    ListedTool,
    OutputMcpCall,
    OutputMcpListTools,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from jaxllm.serving.responses.toolbox import Listing, OfferedTool

_TERMINAL = {"completed": Completed, "incomplete": Incomplete, "failed": Failed}


class EventWriter:
    """Fills `response` while it says what a stream must send.

    Every method gives events that are to be encoded before the next is taken, for they show the response as it is
    then; what is not taken is not done.
    """

    def __init__(
        self,
        response: Response,
        *,
        summarizes: bool,
        logprobs_count: int | None,
        shows_timings: bool,
        token_bytes: TokenBytes,
        find_tool: Callable[[str], OfferedTool | None],
    ):
        self.response = response
        self._shows_timings = shows_timings
        self.finish_reason: str | None = None
        """Of the last reply: "stop", "tool_calls", "length", or what else ended it."""
        self._items = OutputItems(response.output)
        self._answer = AnswerWriter(
            self._items,
            summarizes=summarizes,
            logprobs_count=logprobs_count,
            token_bytes=token_bytes,
            find_tool=find_tool,
        )
        self._events = 0

    @property
    def calls(self) -> list[OutputMcpCall]:
        """Those that wait to be run, or are running."""
        return list(self._answer.calls)

    @property
    def came_to_end(self) -> bool:
        """Whether the last reply is whole."""
        return self.finish_reason in ("stop", "tool_calls")

    @property
    def asks_client(self) -> bool:
        """Whether the client has to do something before the model goes on."""
        return self._answer.asks_client

    def open(self) -> Iterator[ResponseEvent]:
        yield self._numbered(Created(response=self.response))
        if self.response.status == "queued":
            yield self._numbered(Queued(response=self.response))
            self.response.status = "in_progress"
        yield self._numbered(InProgress(response=self.response))

    def list_tools(self, listing: Listing) -> Iterator[ResponseEvent]:
        """What a server offers."""
        item = OutputMcpListTools(id=new_id("mcpl"), server_label=listing.label, tools=[])
        yield self._numbered(self._items.begin(item))
        yield self._numbered(McpListToolsInProgress(**self._items.place(item)))
        item.error = listing.error
        item.tools = [
            ListedTool(
                name=tool.name,
                input_schema=tool.parameters,
                description=tool.description,
                annotations=tool.annotations,
            )
            for tool in listing.tools
        ]
        ended = McpListToolsCompleted if listing.error is None else McpListToolsFailed
        yield self._numbered(ended(**self._items.place(item)))
        yield self._numbered(self._items.end(item))

    def begin_approved(self, request: Item) -> Iterator[ResponseEvent]:
        """The call that an approval request asked for."""
        label, name, arguments = request["server_label"], request["name"], request["arguments"]
        yield from self._all_numbered(self._answer.begin_call(label, name, arguments, approved=request["id"]))

    def add(self, piece: Piece) -> Iterator[ResponseEvent]:
        """What one piece of a reply brings."""
        self.finish_reason = piece.finish_reason
        yield from self._all_numbered(self._answer.add(piece))

    def end_reply(self) -> Iterator[ResponseEvent]:
        """The reply is over; `calls` may have to be run."""
        yield from self._all_numbered(self._answer.end("completed" if self.came_to_end else "incomplete"))

    def end_call(self, call: OutputMcpCall, result: ToolResult) -> Iterator[ResponseEvent]:
        """What came of one of `calls`."""
        self._answer.calls.remove(call)
        if result.error is None:
            call.status, call.output = "completed", result.text
            yield self._numbered(McpCallCompleted(**self._items.place(call)))
        else:
            call.status, call.error = "failed", result.error
            yield self._numbered(McpCallFailed(**self._items.place(call)))
        yield self._numbered(self._items.end(call))

    def finish(self, usage: Usage, phases: Phases) -> Iterator[ResponseEvent]:
        """Close what is open and settle the response; `last` tells of it."""
        yield from self._close()
        response = self.response
        self._account(usage, phases)
        if self.came_to_end:
            response.status, response.completed_at = "completed", int(time.time())
        elif self.finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        else:
            response.status, response.error = "failed", STOPPED

    def fail(self, error: APIError, usage: Usage, phases: Phases) -> Iterator[ResponseEvent]:
        """Close what is open and settle the response as failed; `last` tells of it."""
        message, told = str(error), error.body["error"]
        self.finish_reason = "error"
        yield from self._close()
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response.status, self.response.error = "failed", ResponseError(code, message)
        self.response.completed_at, self.response.incomplete_details = UNSET, None
        self._account(usage, phases)
        yield self._numbered(StreamError(code=told["code"], message=message, param=told["param"]))

    def last(self) -> ResponseEvent:
        """The event that ends the stream; asked for again after `fail`, where it could not be kept, it is another."""
        event = self._numbered(_TERMINAL[self.response.status](response=self.response))
        self._events -= 1
        return event

    def _account(self, usage: Usage, phases: Phases) -> None:
        self.response.usage = _usage(usage)
        if self._shows_timings:
            self.response.timings = timings(usage, phases)

    def _close(self) -> Iterator[ResponseEvent]:
        yield from self.end_reply()
        for call in self.calls:
            call.status = "incomplete"
            self._answer.calls.remove(call)
            yield self._numbered(self._items.end(call))

    def _all_numbered(self, events: Iterable[ResponseEvent]) -> Iterator[ResponseEvent]:
        return map(self._numbered, events)

    def _numbered(self, event: ResponseEvent) -> ResponseEvent:
        event.sequence_number = self._events
        self._events += 1
        return event


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
