"""One response under way: its reply, its events, and its place in the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from jaxllm.serving.http.errors import to_api_error
from jaxllm.serving.reply import Reply
from jaxllm.serving.responses.events import server_sent
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import Response
from jaxllm.serving.responses.writer import EventWriter
from jaxllm.serving.store.responses import ResponseStore

logger = logging.getLogger(__name__)


class ResponseRun:
    """An async context: entering starts the generation, leaving aborts it unless it has finished."""

    def __init__(
        self,
        reply: Reply,
        writer: EventWriter,
        input_items: Sequence[Item],
        store: ResponseStore,
        *,
        keeps_events: bool = False,
    ):
        self.keeps_events = keeps_events
        self.sent: list[bytes] = []
        """Every event so far, by its sequence number, with `keeps_events`."""
        self._reply = reply
        self._writer = writer
        self._input_items = input_items
        self._store = store

    @property
    def response(self) -> Response:
        """The response as far as it has come."""
        return self._writer.response

    async def __aenter__(self) -> ResponseRun:
        await self._reply.generation.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._reply.generation.__aexit__(*error)

    async def begin_stored(self) -> None:
        """Keep the response before it has run, as one that will be asked for by its id."""
        await self._store.begin(self.response, self._input_items)

    async def to_end(self) -> Response:
        """The whole response, stored if it is to be. Raises what stops the generation."""
        async for gained in self._reply.generation.arrivals():
            for index, delta in gained:
                for _ in self._writer.add(self._reply.parse(index, delta)):
                    pass
        for _ in self._writer.finish(self._reply.usage()):
            pass
        await self._save()
        return self.response

    async def events(self, keep_alive: float | None = None) -> AsyncIterator[list[bytes]]:
        """Server-sent events as they come, an empty list after `keep_alive` seconds of silence.

        What stops the generation becomes an error event and a failed response. The last event follows the store, so
        that whoever has seen it finds the response there.
        """
        writer, reply = self._writer, self._reply
        yield self._note([server_sent(event) for event in writer.open()])
        try:
            async for gained in reply.generation.arrivals(keep_alive):
                sent = [
                    server_sent(event) for index, delta in gained for event in writer.add(reply.parse(index, delta))
                ]
                if sent or not gained:
                    yield self._note(sent)
            sent = self._note([server_sent(event) for event in writer.finish(reply.usage())])
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.status == 500:
                logger.exception("%s failed while running", self.response.id)
            sent = self._note([server_sent(event) for event in writer.fail(api_error, reply.usage())])
        if sent:
            yield sent
        last = [server_sent(writer.last())]
        await self._save(b"".join(self.sent + last) if self.keeps_events else None)
        yield self._note(last)

    def abort(self) -> None:
        """End now, as failed."""
        self._reply.generation.abort()

    def _note(self, sent: list[bytes]) -> list[bytes]:
        if self.keeps_events:
            self.sent += sent
        return sent

    async def _save(self, events: bytes | None = None) -> None:
        response = self.response
        if response.store or response.conversation:
            await self._store.finish(response, self._input_items, begun=response.background, events=events)
