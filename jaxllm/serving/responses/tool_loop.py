"""The turns of a response: the model answers, the tools that it calls run, and it answers again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

import msgspec

from jaxllm.errors import ContextLengthError
from jaxllm.mcp.tools import ToolResult
from jaxllm.serving.generation import Usage
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.phases import Phases
from jaxllm.serving.reply import Reply
from jaxllm.serving.responses.events import ResponseEvent
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import OutputMcpCall
from jaxllm.serving.responses.offers import make_offer
from jaxllm.serving.responses.replies import Replies
from jaxllm.serving.responses.request import ResponseRequest
from jaxllm.serving.responses.toolbox import Toolbox, failed
from jaxllm.serving.responses.writer import EventWriter

logger = logging.getLogger(__name__)


class ToolLoop:
    """An async context: entering begins the first turn, so that what is refused is refused there; leaving ends all.

    It ends where a reply calls no tool of a server's, or asks the client for something: to run a function, or to
    approve of a call. Calls beyond the limit are refused, and then no such tools are offered any more.
    `approved` are calls that run before the model is asked.
    """

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
        self._body = body
        self._replies = replies
        self._toolbox = toolbox
        self._writer = writer
        self._approved = approved
        self._listed = set(listed)
        self._most_calls = most_calls if body.max_tool_calls is None else min(body.max_tool_calls, most_calls)
        self._num_calls = 0
        self._goes_on = bool(approved)
        """Whether calls have run whose results the model has yet to see."""
        self._reply: Reply | None = None
        self._past, self._past_phases = Usage(0, 0), Phases()
        """Of the replies that are over."""
        self._running: dict[asyncio.Task[ToolResult], OutputMcpCall] = {}
        self._ended_by: APIError | None = None

    async def __aenter__(self) -> ToolLoop:
        try:
            model = self._replies.model
            model.check_accepting()
            model.running.add(self)
            await self._toolbox.open()
            if not self._approved:
                await self._begin_reply()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._end_reply()
            await self._stop_calls()
        finally:
            self._replies.model.running.discard(self)
            await self._toolbox.aclose()

    async def events(self, keep_alive: float | None = None) -> AsyncGenerator[Iterable[ResponseEvent], None]:
        """What happens, as it happens; see EventWriter. Nothing after `keep_alive` seconds of silence.

        Raises what stops the generation.
        """
        writer = self._writer
        for listing in self._toolbox.listings:
            if listing.label not in self._listed:
                yield writer.list_tools(listing)
        for request in self._approved:
            yield writer.begin_approved(request)
        async for events in self._run_calls(keep_alive):
            yield events
        while await self._has_reply():
            assert self._reply is not None
            async for gained in self._reply.generation.arrivals(keep_alive):
                if not gained:
                    yield ()
                for index, delta in gained:
                    yield writer.add(self._reply.parse(index, delta))
            yield writer.end_reply()
            await self._end_reply()
            self._goes_on = bool(writer.calls) and writer.came_to_end
            if self._goes_on:
                async for events in self._run_calls(keep_alive):
                    yield events

    def abort(self, error: APIError) -> None:
        """End now, as failed with the error."""
        self._ended_by = error
        if self._reply is not None:
            self._reply.generation.abort(error)
        for task in self._running:
            task.cancel()

    def usage(self) -> Usage:
        """Of all replies so far."""
        return self._past if self._reply is None else self._past + self._reply.usage()

    def phases(self) -> Phases:
        """Where the time of all replies so far has gone."""
        return self._past_phases if self._reply is None else self._past_phases + self._reply.generation.phases()

    async def _has_reply(self) -> bool:
        """Whether there is a reply to read, begun now if need be. A response without room for one ends as it is."""
        if self._reply is not None:
            return True
        if self._goes_on and self._ended_by is not None:
            raise self._ended_by
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

    async def _begin_reply(self) -> None:
        offer = make_offer(
            self._body, self._toolbox, forces=not self._num_calls, runs=self._num_calls < self._most_calls
        )
        output = msgspec.to_builtins(self._writer.response.output)
        reply = await self._replies.begin(offer, output, self._past.completion_tokens)
        await reply.generation.__aenter__()
        self._reply = reply
        if self._ended_by is not None:
            reply.generation.abort(self._ended_by)

    async def _end_reply(self) -> None:
        if self._reply is not None:
            self._past, self._past_phases = self.usage(), self.phases()
            reply, self._reply = self._reply, None
            await reply.generation.__aexit__()

    async def _run_calls(self, keep_alive: float | None) -> AsyncIterator[Iterable[ResponseEvent]]:
        """Run the calls that wait for it, all at once where the request allows parallel calls."""
        waiting = deque(self._writer.calls)
        while waiting and self._ended_by is None:
            for call in [waiting.popleft() for _ in range(len(waiting) if self._body.parallel_tool_calls else 1)]:
                if self._num_calls < self._most_calls:
                    self._num_calls += 1
                    self._running[asyncio.create_task(self._toolbox.call(call))] = call
                else:
                    problem = f"no call is left: max_tool_calls is {self._most_calls}"
                    yield self._writer.end_call(call, failed(problem))
            while self._running:
                done, _ = await asyncio.wait(self._running, timeout=keep_alive, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield ()
                for task in [task for task in self._running if task in done]:
                    call = self._running.pop(task)
                    if not task.cancelled():
                        yield self._writer.end_call(call, task.result())

    async def _stop_calls(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
