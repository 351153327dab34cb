"""A client's call of a model: everything that accompanies it, from its arrival until its last byte has been sent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Concatenate, ParamSpec, TypeVar

from fastapi import Request

from jaxllm.chat.conversation import Conversation
from jaxllm.chat.pictures import Sent
from jaxllm.chat.prompt import shown_pictures
from jaxllm.errors import Field, InvalidRequestError, QueueFullError
from jaxllm.requests.steering import AdapterUse
from jaxllm.serving.access.keys import OTHERS, Metered, Tenant, Window, refused, tenant_of
from jaxllm.serving.access.usage import Used
from jaxllm.serving.adapters import LoadedAdapter
from jaxllm.serving.http import route
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.request_model import FOREVER
from jaxllm.serving.model_loader import WAITING
from jaxllm.serving.request_log import Record
from jaxllm.serving.request_metrics import ModelCall
from jaxllm.serving.served_model import LoadableModel, Running, ServedModel
from jaxllm.serving.state import ServerState

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ClientCall:
    """A client's call of a model: its key, its hold on the model, what it uses, and the record of its request.

    An async context. It holds its model from its creation, and its record from its entry. Its end gives back
    everything, also what `enter` has entered; a second end does nothing.

    Attributes:
        name: the client's name for the model, or for one of the model's adapters.
        record: of its request; None where no observer wants one.
        waits: True until its turn has come and the model is loaded; until then others may have that unloaded.
    """

    def __init__(
        self,
        state: ServerState,
        name: str,
        of: LoadableModel,
        tenant: Tenant = OTHERS,
        *,
        adapter: LoadedAdapter | None = None,
        record: Record | None = None,
        headers: dict[str, str] | None = None,
    ):
        """The `headers` are those of the answer, which tell what its key has left."""
        self.state = state
        self.name = name
        self.tenant = tenant
        self.record = record
        self.waits = True
        self._of = of
        self._adapter = adapter
        self._headers = {} if headers is None else headers
        self._entered = AsyncExitStack()
        self._requests = 0  # that the usage of its key does not have yet
        self._window: Window | None = None
        self._fetched: dict[Sent, bytes] = {}  # images, for each of its answers
        of.calls.add(self)
        of.last_used = time.monotonic()

    @property
    def model(self) -> ServedModel:
        """The model, which is loaded by the time that the call has begun."""
        assert self._of.served is not None, f"{self._of.name} is not loaded"
        return self._of.served

    async def __aenter__(self) -> ClientCall:
        if self.record is not None:
            self._entered.enter_context(self.record)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._entered.aclose()
        finally:
            if self in self._of.calls:
                self._of.calls.remove(self)
                self._of.last_used = time.monotonic()
            if requests := self._take_requests():
                self.state.usage.add(self.tenant.name, self._of.name, Used(requests))

    async def begin(self, *, keep_alive: float | None = None, yields: bool = False) -> None:
        """Wait until its turn has come and the model is loaded.

        The model then stays loaded for `keep_alive` seconds without a call, where that is given. A call that `yields`
        waits for no busy model.

        Raises 400 where a model that is never unloaded is to stay for a time, 429 where the tenant has too many
        requests under way or has sent too many, and 503 as ModelLoader.load. The model is given back then.
        """
        model = self._of
        try:
            if keep_alive is not None and model.pinned and keep_alive != FOREVER:
                message = (
                    f"keep_alive is {keep_alive:g} s: model {model.name!r} is not unloaded; leave it out, or send -1"
                )
                raise APIError(400, message, param="keep_alive")
            self.state.registry.check_concurrency(self.tenant)
            await self._count_request()
            if self.waits:  # its turn may have come meanwhile
                await self.state.registry.loader.load(model, yields=yields)
        except BaseException:
            await self._uncount_request()
            await self.__aexit__()
            raise
        self.waits = False
        if keep_alive is not None:
            model.keep_alive = keep_alive

    def again(self) -> ClientCall:
        """A second call like it, for work that goes on after the request has ended."""
        call = ClientCall(self.state, self.name, self._of, self.tenant, adapter=self._adapter, record=self.record)
        call.waits = False
        return call

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter what ends with the call at the latest."""
        return await self._entered.enter_async_context(context)

    async def prepare(
        self, work: Callable[Concatenate[ServedModel, Conversation, P], T], conversation: Conversation,
        *args: P.args, **kwargs: P.kwargs,
    ) -> T:  # fmt: skip
        """Run work that renders a conversation in a thread, once its images are here. Raises InvalidRequestError."""
        if pictures := shown_pictures(self.model, conversation):
            await self.state.media.fetch(pictures, self.tenant.name, self._fetched)
        workers = self.state.workers_for(conversation)
        return await self.state.run_in(workers, lambda: work(self.model, conversation, *args, **kwargs))

    def adapter_uses(self, scales: Mapping[int, float] | None = None) -> tuple[AdapterUse, ...]:
        """The adapter of the model, or those of `scales`. Raises InvalidRequestError for both or unknown ones."""
        if self._adapter is not None and scales is not None:
            raise InvalidRequestError([Field("lora"), f" is set, but model {self.name!r} is an adapter already"])
        if self._adapter is not None:
            return (self._adapter.use(self._adapter.scale),)
        return self._of.adapters.uses(scales) if self._of.config.enable_lora or scales is not None else ()

    @asynccontextmanager
    async def asking(
        self, running: Running, asked: ModelCall, most_tokens: int, *, goes_on: bool = False
    ) -> AsyncIterator[None]:
        """Ask the model once, with at most `most_tokens` tokens of prompts and answers.

        Inside, `running` is one of the requests under way; one that `goes_on` belongs to a request that is so already.
        At the end the key is charged for the tokens in `asked` and the record keeps it, but not where it has no tokens
        of a prompt: the engine has not taken it then. One that is refused for lack of room counts as no request.

        Raises 503 where no request can start, and 429 where the key has not that many tokens left.
        """
        model = self.model
        reserved, is_accepted = None, False
        try:
            model.check_accepting(goes_on=goes_on)
            if not goes_on:
                model.running.add(running)
            reserved = await self._reserve(most_tokens)
            is_accepted = True
            yield
        except QueueFullError:
            model.metrics.count_rejected()
            asked.prompt_tokens, is_accepted = 0, False
            raise
        finally:
            if not is_accepted:
                await self._uncount_request()
            model.running.discard(running)
            asked.ended = time.time()
            if asked.prompt_tokens and self.record is not None:
                self.record.calls.append(asked)
            requests = self._take_requests() if asked.prompt_tokens else 0
            used = Used(requests, asked.prompt_tokens, asked.cached_tokens, asked.completion_tokens)
            await self._settle(reserved, used)

    async def _count_request(self) -> None:
        limit = self.tenant.requests_per_minute
        if limit is not None:
            self._window = await self._take("requests", limit, 1, f"this API key may send {limit} requests a minute")
        self._requests = 1

    def _take_requests(self) -> int:
        requests, self._requests = self._requests, 0
        return requests

    async def _uncount_request(self) -> None:
        """The request is refused for lack of room: it, and not this attempt, counts once it is sent again."""
        if self._take_requests() and self._window is not None:
            self._headers["x-ratelimit-remaining-requests"] = str(self._window.remaining + 1)
            await self._correct("requests", self.tenant.requests_per_minute, -1, self._window)

    async def _reserve(self, tokens: int) -> tuple[int, Window] | None:
        """Count up to a minute's limit of tokens before they are used: their number, and the minute that has them.

        None where the key has no limit of tokens. Raises 429 where that many are not left.
        """
        limit = self.tenant.tokens_per_minute
        if limit is None:
            return None
        wanted = min(tokens, limit)
        problem = f"this API key may use {limit} tokens a minute, and the request may use {tokens}, max_tokens included"
        return wanted, await self._take("tokens", limit, wanted, problem)

    async def _settle(self, reserved: tuple[int, Window] | None, used: Used) -> None:
        """Count what was used in place of what was reserved."""
        if used != Used():
            self.state.usage.add(self.tenant.name, self._of.name, used)
        if reserved is not None:
            tokens, window = reserved
            await self._correct("tokens", self.tenant.tokens_per_minute, used.tokens - tokens, window)

    async def _correct(self, kind: Metered, limit: int | None, difference: int, window: Window) -> None:
        """A store that does not answer leaves the count as it is."""
        name = self.tenant.name
        assert name is not None and limit is not None, "they were counted"
        try:
            await self.state.limits.correct(kind, name, limit, difference, window)
        except APIError as error:
            logger.error("API key %s is counted %d %s too many: %s", name, -difference, kind, error)

    async def _take(self, kind: Metered, limit: int, cost: int, problem: str) -> Window:
        assert self.tenant.name is not None, "only a key of the file of keys has limits"
        taken, window = await self.state.limits.take(kind, self.tenant.name, limit, cost)
        seconds = max(window.resets - time.time(), 0.0)
        self._headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        self._headers[f"x-ratelimit-remaining-{kind}"] = str(window.remaining)
        self._headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(seconds)}s"
        if not taken:
            message = f"{problem}; {window.remaining} are left, and the next minute begins in {math.ceil(seconds)} s"
            raise refused(message, seconds)
        return window


async def chunk_stream(
    call: ClientCall,
    generation: route.AnswerSource[route.Gained],
    writer: route.ChunkWriter[route.Gained],
    headers: Mapping[str, str] | None = None,
) -> route.EventStream:
    """An answer as server-sent events, in which errors become one. Raises what the answer's beginning raises."""
    await call.enter(generation)
    events = route.chunks_of(generation, writer, call.state.config.sse_keep_alive)
    return route.EventStream(generation.id, events, headers=headers, keep_alive=writer.keep_alive)


async def open_call(
    request: Request, name: str | None, *, keep_alive: float | None = None, stream: bool = False
) -> ClientCall:
    """The call of a request for a model, open until the last byte of the answer; each request opens one, once.

    A request that wants a `stream` is told in comments how far its model is, if that has to be loaded.

    Raises 404 for an unknown name, and otherwise as ClientCall.begin.
    """
    answer = route.Answer.of(request)
    assert not answer.has_call, "a request opens its call once"
    answer.has_call = True
    state: ServerState = request.app.state.server
    tenant = tenant_of(request)
    called, model = state.registry.called(name, tenant)
    record = request.scope.get(route.RECORD)
    if record is not None:
        record.asked_model = model.name

    async def begin() -> ClientCall:
        adapter = None if called in model.names else model.adapters.get(called)
        call = ClientCall(state, called, model, tenant, adapter=adapter, record=record, headers=answer.headers)
        await call.begin(keep_alive=keep_alive, yields=route.YIELDS in request.scope)
        return await answer.held.enter_async_context(call)

    if not stream or state.registry.loader.may_run(model):
        return await begin()

    def doing() -> str:
        return f"loading {model.name}: {model.stage or WAITING}"

    return await route.until_disconnect(request.receive, route.telling(answer, begin(), doing))
