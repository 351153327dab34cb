"""One response under way: its events, and its place in the store."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing

from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.answers import to_api_error
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.responses.events import ResponseEvent, server_sent
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import Response
from jaxllm.serving.responses.response_store import ResponseStore
from jaxllm.serving.responses.tool_loop import ResponseLoop
from jaxllm.serving.responses.writer import EventWriter

logger = logging.getLogger(__name__)


class ResponseRun:
    """An async context: entering starts the generation, leaving aborts it unless it has finished."""

    def __init__(
        self,
        loop: ResponseLoop,
        call: ClientCall,
        writer: EventWriter,
        input_items: Sequence[Item],
        store: ResponseStore,
        *,
        keeps_events: bool = False,
    ):
        self.keeps_events = keeps_events
        self.sent: list[bytes] = []
        """Every event so far, by its sequence number, with `keeps_events`."""
        self.call = call
        """The request's: a run that outlives the request takes one more."""
        self._loop = loop
        self._writer = writer
        self._input_items = input_items
        self._store = store

    @property
    def response(self) -> Response:
        """The response as far as it has come."""
        return self._writer.response

    async def __aenter__(self) -> ResponseRun:
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._loop.__aexit__(*error)

    async def begin_stored(self) -> None:
        """Keep the response before it has run, as one that will be asked for by its id."""
        await self._store.begin(self.response, self._input_items, self.call.tenant.name)

    async def to_end(self) -> Response:
        """The whole response, stored if it is to be. Raises what stops the generation."""
        async for events in self._loop.events():
            _exhaust(events)
        _exhaust(self._writer.finish(self._loop.usage(), self._loop.phases()))
        await self._save()
        return self.response

    async def events(self, keep_alive: float | None = None) -> AsyncIterator[list[bytes]]:
        """Server-sent events as they come, an empty list after `keep_alive` seconds of silence.

        What stops the generation, or keeps the response from being stored, becomes an error event and a failed
        response. The last event follows the store, so that whoever has seen it finds the response there.
        """
        writer, loop = self._writer, self._loop
        yield self._note([server_sent(event) for event in writer.open()])
        try:
            async with aclosing(loop.events(keep_alive)) as happening:
                async for events in happening:
                    sent = [server_sent(event) for event in events]
                    if sent or events == ():
                        yield self._note(sent)
            ended = writer.finish(loop.usage(), loop.phases())
            sent = self._note([server_sent(event) for event in ended])
        except Exception as error:
            sent = self._note(self._failed(error, "failed while running"))
        if sent:
            yield sent
        last = [server_sent(writer.last())]
        try:
            await self._save(b"".join(self.sent + last) if self.keeps_events else None)
        except Exception as error:
            last = [*self._failed(error, "could not be stored"), server_sent(writer.last())]
        yield self._note(last)

    def abort(self, error: APIError) -> None:
        """End now, as failed with the error."""
        self._loop.abort(error)

    def _failed(self, error: Exception, what: str) -> list[bytes]:
        """The events that tell of an error. The log has the details of one that clients are not told."""
        api_error = to_api_error(error)
        if api_error.status in (500, 507):
            logger.error("%s %s: %s", self.response.id, what, error, exc_info=api_error.status == 500)
        events = self._writer.fail(api_error, self._loop.usage(), self._loop.phases())
        return [server_sent(event) for event in events]

    def _note(self, sent: list[bytes]) -> list[bytes]:
        if self.keeps_events:
            self.sent += sent
        return sent

    async def _save(self, events: bytes | None = None) -> None:
        response = self.response
        if response.store or response.conversation:
            owner = self.call.tenant.name
            await self._store.finish(response, self._input_items, owner, begun=response.background, events=events)


def _exhaust(events: Iterable[ResponseEvent]) -> None:
    deque(events, maxlen=0)
