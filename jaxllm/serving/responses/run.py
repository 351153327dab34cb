"""One response under way: the model answers, the tools that it calls run, and it answers again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import msgspec

from jaxllm.chat.conversation import naming
from jaxllm.chat.prompt import sampling_params, with_seen
from jaxllm.errors import ContextLengthError
from jaxllm.mcp.tools import ToolResult, refused
from jaxllm.serving.call import ClientCall
from jaxllm.serving.generation import GenerationSettings, Reply, ReplyLoop, begin_reply
from jaxllm.serving.http.answers import to_api_error
from jaxllm.serving.http.route import server_sent
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import OutputMcpCall, Response, ResponseEvent
from jaxllm.serving.responses.request import ResponseRequest
from jaxllm.serving.responses.stores import ResponseStore
from jaxllm.serving.responses.toolbox import Offer, Toolbox, make_offer
from jaxllm.serving.responses.translate import Translation, generation_settings, turns
from jaxllm.serving.responses.writer import EventWriter

logger = logging.getLogger(__name__)


class Replies:
    """Begins replies to a `context` that ends with the request's `own`. Raises InvalidRequestError for bad settings."""

    def __init__(self, call: ClientCall, body: ResponseRequest, context: Sequence[Item], own: Sequence[Item]):
        self.call = call
        """The request's: a run that outlives the request takes one more."""
        self.body = body
        self.context = context
        self.own = own
        translation = self._translation(context, Offer([], "auto"))
        with naming(translation.name):
            self.params = sampling_params(call.model, generation_settings(body))

    async def begin(self, offer: Offer, output: Sequence[Item], num_generated: int) -> Reply:
        """The reply to the request and to the response's `output` since, which has taken `num_generated` tokens.

        Raises InvalidRequestError naming the field; ContextLengthError where the prompt does not fit, even cut.
        """
        context = [*self.context, *output]
        settings = generation_settings(self.body)
        if output:
            most = None if settings.max_tokens is None else settings.max_tokens - num_generated
            sampling = {name: value for name, value in settings.sampling.items() if name != "min_tokens"}
            settings = replace(settings, sampling=sampling, max_tokens=most)
        elif self.body.truncation == "auto":
            most = self.call.model.engine.info.max_model_len // 2
            roomy = replace(settings, room=min(settings.max_tokens or 1, most))
            with suppress(ContextLengthError):
                return await self._fitting(context, offer, roomy)
        return await self._fitting(context, offer, settings)

    async def _fitting(self, context: Sequence[Item], offer: Offer, settings: GenerationSettings) -> Reply:
        try:
            return await self._reply(context, offer, settings)
        except ContextLengthError as error:
            if self.body.truncation == "disabled":
                raise
            too_long = error
        fitting: Reply | None = None
        cuts = [cut for cut in turns(context) if cut > 0]
        low, high = 0, len(cuts)
        while low < high:
            middle = (low + high) // 2
            cut, roles = context[: cuts[middle]], ("system", "developer")
            instructions = [item for item in cut if item["type"] == "message" and item["role"] in roles]
            kept = [*instructions, *context[cuts[middle] :]]
            try:
                fitting = await self._reply(kept, offer, settings)
                high = middle
            except ContextLengthError as error:
                too_long = error
                low = middle + 1
        if fitting is None:
            raise too_long
        return fitting

    async def _reply(self, context: Sequence[Item], offer: Offer, settings: GenerationSettings) -> Reply:
        translation = self._translation(context, offer)
        with naming(translation.name):
            return await begin_reply(self.call, translation.conversation(), settings, prefix="resp-", goes_on=True)

    def _translation(self, context: Sequence[Item], offer: Offer) -> Translation:
        return Translation(self.body, context, self.own, offer, list(self.call.model.special_tokens))


class ResponseRun(ReplyLoop[Iterable[ResponseEvent], OutputMcpCall]):
    """An async context: entering begins the first turn, so that what is refused is refused there; leaving ends all."""

    silence = ()

    def __init__(
        self,
        replies: Replies,
        toolbox: Toolbox,
        writer: EventWriter,
        store: ResponseStore,
        *,
        approved: Sequence[Item],
        most_calls: int,
    ):
        """`approved` are calls that run before the model is asked."""
        body = replies.body
        most_calls = most_calls if body.max_tool_calls is None else min(body.max_tool_calls, most_calls)
        super().__init__(replies.call.model, most_calls, parallel=body.parallel_tool_calls)
        self.response = writer.response
        """The response as far as it has come."""
        self.keeps_events = body.background and body.stream
        self.sent: list[bytes] = []
        """Every event so far, by its sequence number, where it `keeps_events`."""
        self.replies = replies
        self._toolbox = toolbox
        self._writer = writer
        self._store = store
        self._approved = approved
        self._goes_on = bool(approved)
        """True while calls have run, or are to run, whose results the model has yet to see."""

    async def __aenter__(self) -> ResponseRun:
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

    async def to_end(self) -> Response:
        """The whole response, stored if it is to be. Raises what stops the generation."""
        async for events in self._happenings():
            deque(events, maxlen=0)
        deque(self._writer.finish(self.usage(), self.phases()), maxlen=0)
        await self._save()
        return self.response

    async def events(self, keep_alive: float | None = None) -> AsyncIterator[list[bytes]]:
        """Server-sent events as they come, an empty list after `keep_alive` seconds of silence; errors become events.

        The last event follows the store, so that whoever has seen it finds the response there.
        """
        writer = self._writer
        yield self._note([server_sent(event) for event in writer.open()])
        try:
            async with aclosing(self._happenings(keep_alive)) as happening:
                async for events in happening:
                    sent = [server_sent(event) for event in events]
                    if sent or events == ():
                        yield self._note(sent)
            ended = writer.finish(self.usage(), self.phases())
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

    async def begin_answer(self) -> bool:
        """A response without room for a further reply ends as it is."""
        if self.reply is not None:
            return True
        if self._goes_on and self.ended_by is not None:
            raise self.ended_by
        if not self._goes_on or self._writer.asks_client:
            return False
        limit = self.replies.body.max_output_tokens
        try:
            if limit is None or self._past.completion_tokens < limit:
                await self._begin_reply()
                return True
        except ContextLengthError as error:
            logger.debug("%s ends before its next turn: %s", self.response.id, error)
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
        result = await self._toolbox.call(asked)
        return await self.replies.call.state.offload(with_seen, self.model, result) if result.images else result

    def ended(self, asked: OutputMcpCall, result: ToolResult) -> Iterable[ResponseEvent]:
        return self._writer.end_call(asked, result)

    def no_call_left(self) -> ToolResult:
        return refused(f"no call is left: max_tool_calls is {self.most_calls}")

    async def _happenings(self, keep_alive: float | None = None) -> AsyncGenerator[Iterable[ResponseEvent], None]:
        told = [item for item in self.replies.context if item["type"] == "mcp_list_tools" and item["error"] is None]
        listed = {item["server_label"] for item in told}
        for listing in self._toolbox.listings:
            if listing.label not in listed:
                yield self._writer.list_tools(listing)
        for request in self._approved:
            yield self._writer.begin_approved(request)
        async with aclosing(self.turns(keep_alive)) as turns:
            async for events in turns:
                yield events

    async def _begin_reply(self) -> None:
        body, runs = self.replies.body, self.num_calls < self.most_calls
        offer = make_offer(body, self._toolbox, forces=not self.num_calls, runs=runs)
        output = msgspec.to_builtins(self.response.output)
        await self.enter(await self.replies.begin(offer, output, self._past.completion_tokens))

    def _failed(self, error: Exception, what: str) -> list[bytes]:
        """The events that tell of an error. The log has the details of one that clients are not told."""
        api_error = to_api_error(error)
        if api_error.status in (500, 507):
            logger.error("%s %s: %s", self.response.id, what, error, exc_info=api_error.status == 500)
        return [server_sent(event) for event in self._writer.fail(api_error, self.usage(), self.phases())]

    def _note(self, sent: list[bytes]) -> list[bytes]:
        if self.keeps_events:
            self.sent += sent
        return sent

    async def _save(self, events: bytes | None = None) -> None:
        response = self.response
        if response.store or response.conversation:
            await self._store.finish(response, self.replies.own, self.replies.call.tenant.name, events)
