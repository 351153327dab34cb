"""The turns of a response: the model answers, the tools that it calls run, and it answers again."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing

import msgspec

from jaxllm.errors import ContextLengthError
from jaxllm.mcp.tools import ToolResult, refused
from jaxllm.serving.generation import ReplyLoop
from jaxllm.serving.responses.events import ResponseEvent
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import OutputMcpCall
from jaxllm.serving.responses.offers import make_offer
from jaxllm.serving.responses.replies import Replies
from jaxllm.serving.responses.request import ResponseRequest
from jaxllm.serving.responses.toolbox import Toolbox
from jaxllm.serving.responses.writer import EventWriter

logger = logging.getLogger(__name__)


class ResponseLoop(ReplyLoop[Iterable[ResponseEvent], OutputMcpCall]):
    """An async context: entering begins the first turn, so that what is refused is refused there; leaving ends all.

    It ends where a reply calls no tool of a server's, or asks the client for something: to run a function, or to
    approve of a call. Calls beyond the limit are refused, and then no such tools are offered any more.
    `approved` are calls that run before the model is asked.
    """

    silence = ()

    def __init__(
        self,
        body: ResponseRequest,
        replies: Replies,
        toolbox: Toolbox,
        writer: EventWriter,
        *,
        approved: Sequence[Item],
        listed: Iterable[str],
        most_calls: int,
    ):
        """`listed` are the labels of servers whose tools the context lists already."""
        most_calls = most_calls if body.max_tool_calls is None else min(body.max_tool_calls, most_calls)
        super().__init__(replies.model, most_calls, parallel=body.parallel_tool_calls)
        self._body = body
        self._replies = replies
        self._toolbox = toolbox
        self._writer = writer
        self._approved = approved
        self._listed = set(listed)
        self._goes_on = bool(approved)
        """Whether calls have run, or are to run, whose results the model has yet to see."""

    async def __aenter__(self) -> ResponseLoop:
        try:
            self.model.check_accepting()
            self.model.running.add(self)
            await self._toolbox.open()
            if not self._approved:
                await self._begin_reply()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.leave()
            await self.end_calls()
        finally:
            self.model.running.discard(self)
            await self._toolbox.aclose()

    async def events(self, keep_alive: float | None = None) -> AsyncGenerator[Iterable[ResponseEvent], None]:
        """What happens, as it happens; see EventWriter. Nothing after `keep_alive` seconds of silence.

        Raises what stops the generation.
        """
        for listing in self._toolbox.listings:
            if listing.label not in self._listed:
                yield self._writer.list_tools(listing)
        for request in self._approved:
            yield self._writer.begin_approved(request)
        async with aclosing(self.turns(keep_alive)) as turns:
            async for events in turns:
                yield events

    async def begin_answer(self) -> bool:
        """A response without room for a further reply ends as it is."""
        if self.reply is not None:
            return True
        if self._goes_on and self.ended_by is not None:
            raise self.ended_by
        if not self._goes_on or self._writer.asks_client:
            return False
        limit = self._body.max_output_tokens
        try:
            if limit is None or self._past.completion_tokens < limit:
                await self._begin_reply()
                return True
        except ContextLengthError as error:
            logger.debug("%s ends before its next turn: %s", self._writer.response.id, error)
        self._writer.finish_reason = "length"
        return False

    async def read_answer(self, timeout: float | None) -> AsyncIterator[Iterable[ResponseEvent]]:
        reply = self.reply
        assert reply is not None
        async for gained in reply.generation.arrivals(timeout):
            if not gained:
                yield self.silence
            for index, delta in gained:
                yield self._writer.add(reply.parse(index, delta))
        yield self._writer.end_reply()
        await self.leave()
        self._goes_on = bool(self._writer.calls) and self._writer.came_to_end

    def calls(self) -> Iterable[OutputMcpCall]:
        return self._writer.calls if self._goes_on else ()

    async def call(self, asked: OutputMcpCall) -> ToolResult:
        return await self._toolbox.call(asked)

    def ended(self, asked: OutputMcpCall, result: ToolResult) -> Iterable[ResponseEvent]:
        return self._writer.end_call(asked, result)

    def no_call_left(self) -> ToolResult:
        return refused(f"no call is left: max_tool_calls is {self.most_calls}")

    async def _begin_reply(self) -> None:
        offer = make_offer(self._body, self._toolbox, forces=not self.num_calls, runs=self.num_calls < self.most_calls)
        output = msgspec.to_builtins(self._writer.response.output)
        await self.enter(await self._replies.begin(offer, output, self._past.completion_tokens))
