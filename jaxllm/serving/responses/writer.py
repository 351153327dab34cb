"""From what a reply gains to a response's items, and the events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.serving.generation import Step, Usage
from jaxllm.serving.http.errors import APIError
from jaxllm.serving.openai.logprobs import TokenText, chat_logprobs
from jaxllm.serving.parsing.events import Content, Reasoning, ToolArguments, ToolCall
from jaxllm.serving.reply import Piece
from jaxllm.serving.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDelta,
    ReasoningDone,
    StreamError,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    TextDelta,
    TextDone,
)
from jaxllm.serving.responses.items import new_id
from jaxllm.serving.responses.objects import (
    STOPPED,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    SummaryText,
    TokenLogprob,
    TopLogprob,
)

_TERMINAL = {"completed": Completed, "incomplete": Incomplete, "failed": Failed}


class EventWriter:
    """Fills `response` while it says what a stream must send; one item is open at a time.

    Every method gives events that are to be encoded before the next is taken, for they show the response as it is
    then. White space alone opens no message: what stands between reasoning, text and calls is no text of its own.
    """

    def __init__(self, response: Response, *, summarizes: bool, logprobs_count: int | None, token_text: TokenText):
        self.response = response
        self._summarizes = summarizes
        self._logprobs_count = logprobs_count
        self._token_text = token_text
        self._events = 0
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._held = ""
        self._steps: list[Step] = []
        self._finish_reason: str | None = None

    def open(self) -> Iterator[Event]:
        yield self._numbered(Created(response=self.response))
        if self.response.status == "queued":
            yield self._numbered(Queued(response=self.response))
            self.response.status = "in_progress"
        yield self._numbered(InProgress(response=self.response))

    def add(self, piece: Piece) -> Iterator[Event]:
        """What one piece of the reply brings."""
        self._finish_reason = piece.finish_reason
        self._steps += piece.logprobs
        for event in piece.events:
            match event:
                case Content(text):
                    events = self._add_text(text)
                case Reasoning(text):
                    events = self._add_reasoning(text)
                case ToolCall(_, call_id, name):
                    events = self._add_call(call_id, name)
                case ToolArguments(_, text):
                    events = self._add_arguments(text)
            for sent in events:
                yield self._numbered(sent)

    def finish(self, usage: Usage) -> Iterator[Event]:
        """Close what is open and settle the response; `last` tells of it."""
        whole = self._finish_reason in ("stop", "tool_calls")
        for event in self._finish_items("completed" if whole else "incomplete"):
            yield self._numbered(event)
        response = self.response
        response.usage = _usage(usage)
        if whole:
            response.status, response.completed_at = "completed", int(time.time())
        elif self._finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        else:
            response.status, response.error = "failed", STOPPED

    def fail(self, error: APIError, usage: Usage) -> Iterator[Event]:
        """Close what is open and settle the response as failed; `last` tells of it."""
        message, told = str(error), error.body["error"]
        for event in self._finish_items("incomplete"):
            yield self._numbered(event)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response.status, self.response.error = "failed", ResponseError(code, message)
        self.response.usage = _usage(usage)
        yield self._numbered(StreamError(code=told["code"], message=message, param=told["param"]))

    def last(self) -> Event:
        return self._numbered(_TERMINAL[self.response.status](response=self.response))

    def _add_text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, OutputMessage):
            self._held += text
            if not self._held.strip():
                return
            text, self._held = self._held, ""
            yield from self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
            yield PartAdded(**self._place, part=OutputText(text=""))
        self._texts.append(text)
        logprobs = self._take_logprobs()
        self._logprobs += logprobs
        yield TextDelta(**self._place, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        self._steps.clear()
        if not isinstance(self._open, OutputReasoning):
            yield from self._begin(OutputReasoning(id=new_id("rs"), status="in_progress", summary=[], content=[]))
            if self._summarizes:
                yield SummaryPartAdded(**self._place, part=SummaryText(""))
            else:
                yield PartAdded(**self._place, part=ReasoningText(""))
        self._texts.append(text)
        kind = SummaryDelta if self._summarizes else ReasoningDelta
        yield kind(**self._place, delta=text)

    def _add_call(self, call_id: str, name: str) -> Iterator[Event]:
        self._steps.clear()
        yield from self._begin(
            OutputFunctionCall(id=new_id("fc"), status="in_progress", call_id=call_id, name=name, arguments="")
        )

    def _add_arguments(self, text: str) -> Iterator[Event]:
        self._steps.clear()
        self._texts.append(text)
        yield ArgumentsDelta(**self._place, delta=text)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._open, self._held = item, ""
        yield ItemAdded(output_index=len(self.response.output), item=item)

    def _finish_items(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None and not self.response.output and self._held:
            text, self._held = self._held, ""
            yield from self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
            self._texts.append(text)
            yield PartAdded(**self._place, part=OutputText(text=""))
            yield TextDelta(**self._place, delta=text, logprobs=self._take_logprobs())
        yield from self._close(status)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        """End the open item, which only now is part of the response's output."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        match item:
            case OutputMessage():
                part = OutputText(text=text, logprobs=self._logprobs)
                yield TextDone(**self._place, text=text, logprobs=part.logprobs)
                yield PartDone(**self._place, part=part)
                item.content = [part]
            case OutputReasoning() if self._summarizes:
                summary = SummaryText(text)
                yield SummaryDone(**self._place, text=text)
                yield SummaryPartDone(**self._place, part=summary)
                item.summary = [summary]
            case OutputReasoning():
                reasoning = ReasoningText(text)
                yield ReasoningDone(**self._place, text=text)
                yield PartDone(**self._place, part=reasoning)
                item.content = [reasoning]
            case OutputFunctionCall():
                item.arguments = text
                yield ArgumentsDone(**self._place, name=item.name, arguments=text)
        item.status = status
        index = len(self.response.output)
        self.response.output.append(item)
        self._open, self._texts, self._logprobs = None, [], []
        yield ItemDone(output_index=index, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        """Which item an event is about."""
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.response.output)}

    def _take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last text, whose text may have been held back."""
        steps, self._steps = self._steps, []
        if self._logprobs_count is None:
            return []
        return _logprobs(steps, self._logprobs_count, self._token_text)

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._events
        self._events += 1
        return event


def _logprobs(steps: Sequence[Step], count: int, token_text: TokenText) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token.token,
            token.logprob,
            token.bytes,
            [TopLogprob(top.token, top.logprob, top.bytes) for top in token.top_logprobs],
        )
        for token in chat_logprobs(steps, count, token_text).content
    ]


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
