"""A response as it is filled from the pieces of replies, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET

from jaxllm.chat.conversation import parse_arguments
from jaxllm.chat.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.chat.parser import Piece, Step
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.tools import ToolResult
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.openai.answers import ChatTokenLogprob, TokenBytes, chat_logprobs, obfuscation, timings
from jaxllm.serving.request_metrics import Phases, Usage
from jaxllm.serving.responses import objects
from jaxllm.serving.responses.items import CLEAR, Item, ItemStatus, new_id
from jaxllm.serving.responses.objects import EVENTS, STOPPED, OutputItem, OutputMcpCall, Response, ResponseEvent
from jaxllm.serving.responses.request import ENCRYPTED, ResponseRequest
from jaxllm.serving.responses.toolbox import Listing, OfferedTool
from jaxllm.serving.responses.tools import CustomTool


class EventWriter:
    """Fills `response` while it says what a stream must send.

    An event is to be encoded before the next is taken, for it shows the response as it is then; what is not taken is
    not done. One item that the model writes is open at a time. White space alone opens no message.
    """

    def __init__(
        self, response: Response, body: ResponseRequest, token_bytes: TokenBytes, offered: Mapping[str, OfferedTool]
    ):
        self.response = response
        self.calls: list[OutputMcpCall] = []
        """Calls of servers' tools that wait to be run, or are running."""
        self.asks_client = False
        """The client has to run a function, or to approve a call, before the model goes on."""
        self.finish_reason: str | None = None
        """Of the last reply."""
        self._body = body
        self._token_bytes = token_bytes
        self._offered = offered
        self._client_tools = {one.told_name: one for one in body.client_tools}
        self._pads = body.stream_options is not None and body.stream_options.include_obfuscation
        self._num_events = 0
        self._places: dict[str, int] = {}
        """The place of each item in the output, by its id; others may begin before it ends."""
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._held = ""
        """White space that no message has yet."""
        self._steps: list[Step] = []

    @property
    def came_to_end(self) -> bool:
        return self.finish_reason in ("stop", "tool_calls", "repetition")

    def open(self) -> Iterator[ResponseEvent]:
        yield self._event("response.created", response=self.response)
        if self.response.status == "queued":
            yield self._event("response.queued", response=self.response)
            self.response.status = "in_progress"
        yield self._event("response.in_progress", response=self.response)

    def list_tools(self, listing: Listing) -> Iterator[ResponseEvent]:
        item = objects.OutputMcpListTools(id=new_id("mcpl"), server_label=listing.label, tools=[])
        yield self._begin_item(item)
        yield self._within(item, "response.mcp_list_tools.in_progress")
        item.error = listing.error
        item.tools = [
            objects.ListedTool(
                name=tool.name, input_schema=tool.parameters, description=tool.description, annotations=tool.annotations
            )
            for tool in listing.tools
        ]
        yield self._within(item, f"response.mcp_list_tools.{'completed' if listing.error is None else 'failed'}")
        yield self._end_item(item)

    def begin_approved(self, request: Item) -> Iterator[ResponseEvent]:
        label, name, arguments = request["server_label"], request["name"], request["arguments"]
        yield from self._whole_call(label, name, arguments, approved=request["id"])

    def add(self, piece: Piece) -> Iterator[ResponseEvent]:
        self.finish_reason = piece.finish_reason
        self._steps += piece.logprobs
        for event in piece.events:
            if not isinstance(event, Content):
                self._steps.clear()
            match event:
                case Content(text):
                    yield from self._add_text(text)
                case Reasoning(text):
                    yield from self._add_reasoning(text)
                case ToolCall(_, call_id, name):
                    yield from self._add_call(call_id, name)
                case ToolArguments(_, text):
                    yield from self._add_arguments(text)

    def end_reply(self) -> Iterator[ResponseEvent]:
        if self._open is None and not self.response.output and self._held:
            yield from self._begin_message(self._held)
        if self._steps and self._body.logprobs_count is not None and isinstance(self._open, objects.OutputMessage):
            yield self._say(self._open, "")  # of tokens that came after the last text, as the one that ends the answer
        yield from self._close("completed" if self.came_to_end else "incomplete")
        self._held = ""
        self._steps.clear()

    def end_call(self, call: OutputMcpCall, result: ToolResult) -> Iterator[ResponseEvent]:
        self.calls.remove(call)
        if result.error is None:
            call.status, call.output, call.images = "completed", result.text, result.images or UNSET
        else:
            call.status, call.error = "failed", result.error
        yield self._within(call, f"response.mcp_call.{call.status}")
        yield self._end_item(call)

    def finish(self, usage: Usage, phases: Phases) -> Iterator[ResponseEvent]:
        """Close what is open and settle the response; `last` tells of it."""
        yield from self._close_all()
        response = self.response
        self._account(usage, phases)
        if self.came_to_end:
            response.status, response.completed_at = "completed", int(time.time())
        elif self.finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", objects.IncompleteDetails("max_output_tokens")
        else:
            response.status, response.error = "failed", STOPPED

    def fail(self, error: APIError, usage: Usage, phases: Phases) -> Iterator[ResponseEvent]:
        """Close what is open and settle the response as failed; `last` tells of it."""
        message, told = str(error), error.body["error"]
        self.finish_reason = "error"
        yield from self._close_all()
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response.status, self.response.error = "failed", objects.ResponseError(code, message)
        self.response.completed_at, self.response.incomplete_details = UNSET, None
        self._account(usage, phases)
        yield self._event("error", code=told["code"], message=message, param=told["param"])

    def last(self) -> ResponseEvent:
        """The event that ends the stream; after `fail`, where it could not be stored, it is another."""
        event = self._event(f"response.{self.response.status}", response=self.response)
        self._num_events -= 1
        return event

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        if isinstance(self._open, objects.OutputMessage):
            yield self._say(self._open, text)
            return
        self._held += text
        if self._held.strip():
            yield from self._begin_message(self._held)

    def _begin_message(self, text: str) -> Iterator[ResponseEvent]:
        message = objects.OutputMessage(id=new_id("msg"), status="in_progress", content=[])
        yield from self._begin(message)
        yield self._within(message, "response.content_part.added", part=objects.OutputText(text=""))
        yield self._say(message, text)

    def _say(self, message: objects.OutputMessage, text: str) -> ResponseEvent:
        """The text with the log-probabilities of all tokens since the last, whose text may have been held back."""
        self._texts.append(text)
        steps, self._steps = self._steps, []
        count = self._body.logprobs_count
        logprobs = [] if count is None else chat_logprobs(steps, count, self._token_bytes).content
        self._logprobs += logprobs
        return self._within(message, "response.output_text.delta", delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        summarizes, reasoning = self._body.summarizes, self._open
        if not isinstance(reasoning, objects.OutputReasoning):
            reasoning = objects.OutputReasoning(id=new_id("rs"), status="in_progress", summary=[], content=[])
            yield from self._begin(reasoning)
            part = objects.SummaryText("") if summarizes else objects.ReasoningText("")
            begun = "reasoning_summary_part" if summarizes else "content_part"
            yield self._within(reasoning, f"response.{begun}.added", part=part)
        self._texts.append(text)
        kind = "reasoning_summary_text" if summarizes else "reasoning_text"
        yield self._within(reasoning, f"response.{kind}.delta", delta=text)

    def _add_call(self, call_id: str, name: str) -> Iterator[ResponseEvent]:
        offered = self._offered.get(name)
        if offered is None:
            yield from self._begin(self._client_call(call_id, name))
        elif offered.needs_approval:
            yield from self._close("completed")
            server, tool = offered.tool.server, offered.tool.name
            self._open = objects.OutputMcpApprovalRequest(
                id=new_id("mcpr"), server_label=server, name=tool, arguments=""
            )
            self._held = ""
        else:
            call = _mcp_call(offered.tool.server, offered.tool.name)
            yield from self._begin(call)
            yield self._within(call, "response.mcp_call.in_progress")

    def _client_call(self, call_id: str, told_name: str) -> objects.OutputFunctionCall | objects.OutputCustomToolCall:
        asked = self._client_tools.get(told_name)
        fields: dict[str, Any] = {"status": "in_progress", "call_id": call_id, "name": told_name}
        if asked is not None:
            fields |= {"name": asked.tool.name, "namespace": asked.namespace or UNSET}
        if asked is not None and isinstance(asked.tool, CustomTool):
            return objects.OutputCustomToolCall(id=new_id("ctc"), input="", **fields)
        return objects.OutputFunctionCall(id=new_id("fc"), arguments="", **fields)

    def _add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        match self._open:
            case objects.OutputFunctionCall() as call:
                yield self._within(call, "response.function_call_arguments.delta", delta=text)
            case objects.OutputCustomToolCall() as call:
                yield self._within(call, "response.custom_tool_call_input.delta", delta=text)
            case OutputMcpCall() as call:
                yield self._within(call, "response.mcp_call_arguments.delta", delta=text)

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._open, self._held = item, ""
        yield self._begin_item(item)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the open item; a call of a server's tool ends when it has been run."""
        item, text, logprobs = self._open, "".join(self._texts), self._logprobs
        self._open, self._texts, self._logprobs = None, [], []
        match item:
            case OutputMcpCall():
                yield from self._close_call(item, text, status)
                return
            case objects.OutputMcpApprovalRequest():
                yield from self._ask(item, text, status)
                return
            case objects.OutputMessage():
                part = objects.OutputText(text=text, logprobs=logprobs)
                yield self._within(item, "response.output_text.done", text=text, logprobs=logprobs)
                yield self._within(item, "response.content_part.done", part=part)
                item.content = [part]
            case objects.OutputReasoning() if self._body.summarizes:
                item.summary = [objects.SummaryText(text)]
                yield self._within(item, "response.reasoning_summary_text.done", text=text)
                yield self._within(item, "response.reasoning_summary_part.done", part=item.summary[0])
            case objects.OutputReasoning():
                item.content = [objects.ReasoningText(text)]
                yield self._within(item, "response.reasoning_text.done", text=text)
                yield self._within(item, "response.content_part.done", part=item.content[0])
            case objects.OutputFunctionCall():
                item.arguments, self.asks_client = text, True
                yield self._within(item, "response.function_call_arguments.done", name=item.name, arguments=text)
            case objects.OutputCustomToolCall():
                item.input, self.asks_client = text, True
                yield self._within(item, "response.custom_tool_call_input.done", input=text)
            case _:
                return
        if isinstance(item, objects.OutputReasoning) and ENCRYPTED in self._body.include:
            item.encrypted_content = CLEAR + text
        item.status = status
        yield self._end_item(item)

    def _close_call(self, call: OutputMcpCall, arguments: str, status: ItemStatus) -> Iterator[ResponseEvent]:
        call.arguments = arguments
        yield self._within(call, "response.mcp_call_arguments.done", arguments=arguments)
        if status == "completed":
            self.calls.append(call)
        else:
            call.status = status
            yield self._end_item(call)

    def _ask(
        self, request: objects.OutputMcpApprovalRequest, arguments: str, status: ItemStatus
    ) -> Iterator[ResponseEvent]:
        """Ask for approval, unless there is nothing to approve of: a call that is cut off, or cannot be run."""
        if status == "completed" and _is_object(arguments):
            request.arguments, self.asks_client = arguments, True
            yield self._begin_item(request)
            yield self._end_item(request)
        else:
            yield from self._whole_call(request.server_label, request.name, arguments, status=status)

    def _whole_call(
        self, label: str, name: str, arguments: str, *, approved: str | None = None, status: ItemStatus = "completed"
    ) -> Iterator[ResponseEvent]:
        """A call whose arguments are known already; `approved` is the id of the request that asked for it."""
        call = _mcp_call(label, name, approved)
        yield self._begin_item(call)
        yield self._within(call, "response.mcp_call.in_progress")
        yield self._within(call, "response.mcp_call_arguments.delta", delta=arguments)
        yield from self._close_call(call, arguments, status)

    def _close_all(self) -> Iterator[ResponseEvent]:
        yield from self.end_reply()
        while self.calls:
            call = self.calls.pop(0)
            call.status = "incomplete"
            yield self._end_item(call)

    def _account(self, usage: Usage, phases: Phases) -> None:
        self.response.usage = objects.response_usage(usage)
        if self._body.timings_per_token:
            self.response.timings = timings(usage, phases)

    def _begin_item(self, item: OutputItem) -> ResponseEvent:
        place = self._places[item.id] = len(self.response.output)
        self.response.output.append(item)
        return self._event("response.output_item.added", output_index=place, item=item)

    def _end_item(self, item: OutputItem) -> ResponseEvent:
        return self._event("response.output_item.done", output_index=self._places[item.id], item=item)

    def _within(self, item: OutputItem, name: str, /, **fields: Any) -> ResponseEvent:
        return self._event(name, item_id=item.id, output_index=self._places[item.id], **fields)

    def _event(self, name: str, /, **fields: Any) -> ResponseEvent:
        if self._pads and "delta" in fields:
            fields["obfuscation"] = obfuscation(fields["delta"])
        event: ResponseEvent = EVENTS[name](sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _mcp_call(label: str, name: str, approved: str | None = None) -> OutputMcpCall:
    return OutputMcpCall(
        id=new_id("mcp"),
        status="in_progress",
        server_label=label,
        name=name,
        arguments="",
        approval_request_id=approved,
    )


def _is_object(arguments: str) -> bool:
    try:
        parse_arguments(arguments, Field("arguments"))
    except InvalidRequestError:
        return False
    return True
