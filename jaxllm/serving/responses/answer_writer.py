"""From the pieces of a reply to items, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxllm.chat.answer import Piece, Step
from jaxllm.chat.conversation import parse_arguments
from jaxllm.chat.parsing.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.serving.openai.logprobs import TokenBytes, chat_logprobs
from jaxllm.serving.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    McpArgumentsDelta,
    McpArgumentsDone,
    McpCallInProgress,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
)
from jaxllm.serving.responses.items import ItemStatus, new_id
from jaxllm.serving.responses.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputMcpApprovalRequest,
    OutputMcpCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTopLogprob,
    ReasoningText,
    SummaryText,
    TokenLogprob,
)
from jaxllm.serving.responses.toolbox import OfferedTool

Written = OutputMessage | OutputReasoning | OutputFunctionCall | OutputMcpCall | OutputMcpApprovalRequest
"""What a model writes."""


class OutputItems:
    """A response's items: each keeps the place at which it began, while others begin behind it."""

    def __init__(self, items: list[OutputItem]):
        self.items = items
        self._places: dict[str, int] = {}

    def begin(self, item: OutputItem) -> ItemAdded:
        self._places[item.id] = len(self.items)
        self.items.append(item)
        return ItemAdded(output_index=self._places[item.id], item=item)

    def end(self, item: OutputItem) -> ItemDone:
        return ItemDone(output_index=self._places[item.id], item=item)

    def place(self, item: OutputItem) -> dict[str, Any]:
        """Which item an event is about."""
        return {"item_id": item.id, "output_index": self._places[item.id]}


class AnswerWriter:
    """Adds what the model writes to `output`; one item of it is open at a time.

    Calls of servers' tools are left in `calls` for somebody to run: they are still in progress then. White space alone
    opens no message: what stands between reasoning, text and calls is no text of its own.
    """

    def __init__(
        self,
        output: OutputItems,
        *,
        summarizes: bool,
        logprobs_count: int | None,
        token_bytes: TokenBytes,
        find_tool: Callable[[str], OfferedTool | None],
    ):
        self.calls: list[OutputMcpCall] = []
        self.asks_client = False
        """Whether the client has to run a function, or to approve of a call, before the model goes on."""
        self._output = output
        self._summarizes = summarizes
        self._logprobs_count = logprobs_count
        self._token_bytes = token_bytes
        self._find_tool = find_tool
        self._open: Written | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._held = ""
        self._steps: list[Step] = []

    def add(self, piece: Piece) -> Iterator[ResponseEvent]:
        self._steps += piece.logprobs
        for event in piece.events:
            match event:
                case Content(text):
                    yield from self._add_text(text)
                case Reasoning(text):
                    yield from self._add_reasoning(text)
                case ToolCall(_, call_id, name):
                    yield from self._add_call(call_id, name)
                case ToolArguments(_, text):
                    yield from self._add_arguments(text)

    def begin_call(
        self, label: str, name: str, arguments: str, *, approved: str | None = None, status: ItemStatus = "completed"
    ) -> Iterator[ResponseEvent]:
        """A call whose arguments are known already; `approved` is the id of the request that asked for it."""
        call = OutputMcpCall(
            id=new_id("mcp"),
            status="in_progress",
            server_label=label,
            name=name,
            arguments="",
            approval_request_id=approved,
        )
        yield self._output.begin(call)
        yield McpCallInProgress(**self._output.place(call))
        yield McpArgumentsDelta(**self._output.place(call), delta=arguments)
        yield from self._close_call(call, arguments, status)

    def end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Close what is open: the reply is over."""
        if self._open is None and not self._output.items and self._held:
            text, self._held = self._held, ""
            yield from self._begin_message(text)
        yield from self._close(status)
        self._held = ""
        self._steps.clear()

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, OutputMessage):
            self._held += text
            if not self._held.strip():
                return
            text, self._held = self._held, ""
            yield from self._begin_message(text)
        else:
            yield from self._say(self._open, text)

    def _begin_message(self, text: str) -> Iterator[ResponseEvent]:
        message = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
        yield from self._begin(message)
        yield PartAdded(**self._output.place(message), part=OutputText(text=""))
        yield from self._say(message, text)

    def _say(self, message: OutputMessage, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        logprobs = self._take_logprobs()
        self._logprobs += logprobs
        yield OutputTextDelta(**self._output.place(message), delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        self._steps.clear()
        reasoning = self._open
        if not isinstance(reasoning, OutputReasoning):
            reasoning = OutputReasoning(id=new_id("rs"), status="in_progress", summary=[], content=[])
            yield from self._begin(reasoning)
            if self._summarizes:
                yield SummaryPartAdded(**self._output.place(reasoning), part=SummaryText(""))
            else:
                yield PartAdded(**self._output.place(reasoning), part=ReasoningText(""))
        self._texts.append(text)
        kind = SummaryDelta if self._summarizes else ReasoningDelta
        yield kind(**self._output.place(reasoning), delta=text)

    def _add_call(self, call_id: str, name: str) -> Iterator[ResponseEvent]:
        self._steps.clear()
        offered = self._find_tool(name)
        if offered is None:
            yield from self._begin(
                OutputFunctionCall(id=new_id("fc"), status="in_progress", call_id=call_id, name=name, arguments="")
            )
            return
        label, tool_name = offered.tool.server, offered.tool.name
        if offered.needs_approval:
            yield from self._close("completed")
            request = OutputMcpApprovalRequest(id=new_id("mcpr"), server_label=label, name=tool_name, arguments="")
            self._open, self._held = request, ""
        else:
            call = OutputMcpCall(
                id=new_id("mcp"), status="in_progress", server_label=label, name=tool_name, arguments=""
            )
            yield from self._begin(call)
            yield McpCallInProgress(**self._output.place(call))

    def _add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        self._steps.clear()
        self._texts.append(text)
        match self._open:
            case OutputFunctionCall() as call:
                yield ArgumentsDelta(**self._output.place(call), delta=text)
            case OutputMcpCall() as call:
                yield McpArgumentsDelta(**self._output.place(call), delta=text)

    def _begin(self, item: Written) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._open, self._held = item, ""
        yield self._output.begin(item)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the open item; a call of a server's tool ends when it has been run."""
        item, text, logprobs = self._open, "".join(self._texts), self._logprobs
        self._open, self._texts, self._logprobs = None, [], []
        match item:
            case None:
                return
            case OutputMcpCall():
                yield from self._close_call(item, text, status)
                return
            case OutputMcpApprovalRequest():
                yield from self._ask(item, text, status)
                return
            case OutputMessage():
                part = OutputText(text=text, logprobs=logprobs)
                yield OutputTextDone(**self._output.place(item), text=text, logprobs=part.logprobs)
                yield PartDone(**self._output.place(item), part=part)
                item.content = [part]
            case OutputReasoning() if self._summarizes:
                summary = SummaryText(text)
                yield SummaryDone(**self._output.place(item), text=text)
                yield SummaryPartDone(**self._output.place(item), part=summary)
                item.summary = [summary]
            case OutputReasoning():
                reasoning = ReasoningText(text)
                yield ReasoningDone(**self._output.place(item), text=text)
                yield PartDone(**self._output.place(item), part=reasoning)
                item.content = [reasoning]
            case OutputFunctionCall():
                item.arguments = text
                self.asks_client = True
                yield ArgumentsDone(**self._output.place(item), name=item.name, arguments=text)
        item.status = status
        yield self._output.end(item)

    def _close_call(self, call: OutputMcpCall, arguments: str, status: ItemStatus) -> Iterator[ResponseEvent]:
        call.arguments = arguments
        yield McpArgumentsDone(**self._output.place(call), arguments=arguments)
        if status == "completed":
            self.calls.append(call)
        else:
            call.status = status
            yield self._output.end(call)

    def _ask(self, request: OutputMcpApprovalRequest, arguments: str, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Ask for approval, unless there is nothing to approve of: a call that is cut off, or cannot be run."""
        if status == "completed" and _is_object(arguments):
            request.arguments = arguments
            self.asks_client = True
            yield self._output.begin(request)
            yield self._output.end(request)
            return
        yield from self.begin_call(request.server_label, request.name, arguments, status=status)

    def _take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last text, whose text may have been held back."""
        steps, self._steps = self._steps, []
        if self._logprobs_count is None:
            return []
        return _logprobs(steps, self._logprobs_count, self._token_bytes)


def _is_object(arguments: str) -> bool:
    try:
        parse_arguments(arguments, Field("arguments"))
    except InvalidRequestError:
        return False
    return True


def _logprobs(steps: Sequence[Step], count: int, token_bytes: TokenBytes) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token.token,
            token.logprob,
            token.bytes,
            [OutputTopLogprob(top.token, top.logprob, top.bytes) for top in token.top_logprobs],
        )
        for token in chat_logprobs(steps, count, token_bytes).content
    ]
