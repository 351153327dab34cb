"""A record of each HTTP request, for its line of the log and its trace: who, what, how long, how many tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.requests.sampling import SamplingParams
from jaxllm.serving.phases import Clock, Phases


@dataclass(kw_only=True)
class ModelCall:
    """What the model was asked once for a request, and what came of it.

    Attributes:
        operation: "generate" or "embed".
        num_answers: sequences that were generated, of all prompts.
        params: how they were sampled.
        finish_reasons: how they ended, in that order.
        prompts, answers: their texts, where the record is to have them.
        ended: when the last of it came, or it was given up.
    """

    operation: str
    model: str
    clock: Clock
    num_answers: int
    prompt_tokens: int
    params: SamplingParams | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ended: float = 0.0


@dataclass
class Record:
    """A request, from its first byte until its answer has been sent and what goes on after that has ended.

    Attributes:
        client: its address and port, "-" where there is none.
        began, ended: seconds since the epoch.
        seconds: how long it took, by a clock that nobody sets.
        status: of the answer; 499 where the client went away before there was one.
        client_gone: whether it went away before the answer was complete.
        server: the address and port that it came to.
        route: the path of the route that it is for, once that is known.
        key_name: the name of the API key that it came with, once that is known and if it has one.
        trace_id: of the trace that it belongs to: its caller's, or one that begins here.
        keeps_texts: whether prompts and answers are to be kept.
    """

    method: str
    path: str
    client: str
    headers: Headers
    server: tuple[str, int | None] | None = None
    keeps_texts: bool = False
    route: str | None = None
    key_name: str | None = None
    request_id: str = ""
    trace_id: str | None = None
    status: int = 499
    client_gone: bool = False
    calls: list[ModelCall] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    seconds: float = 0.0

    def note_route(self, path: str) -> None:
        """The path of its route, which routes under /v1 have without that: they answer without it too."""
        self.route = f"/v1{path}" if "/v1/" in self.path and not path.startswith("/v1/") else path

    @property
    def model(self) -> str | None:
        """The model that answered."""
        return self.calls[-1].model if self.calls else None

    @property
    def finish_reasons(self) -> list[str]:
        """How the last call's sequences ended."""
        return self.calls[-1].finish_reasons if self.calls else []

    @property
    def phases(self) -> Phases:
        """Of all calls."""
        return sum((call.clock.phases(call.num_answers) for call in self.calls), Phases())


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")

Observer = Callable[[Record], None]
"""Called with each record that is complete."""

current: ContextVar[tuple[Record, _Hold] | None] = ContextVar("record", default=None)
"""Of the request that is being answered; None where nobody wants to have one."""


class _Hold:
    """Counts who still has something to add; the last one ends the record."""

    def __init__(self, record: Record, observers: Sequence[Observer]):
        self._record = record
        self._observers = observers
        self._count = 0
        self._start = time.monotonic()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if self._count == 0:
            record = self._record
            record.ended, record.seconds = time.time(), time.monotonic() - self._start
            for observer in self._observers:
                observer(record)


def current_record() -> Record | None:
    """The one of the request that is being answered here."""
    found = current.get()
    return None if found is None else found[0]


@contextmanager
def goes_on() -> Iterator[None]:
    """The request that is being answered is not over inside, though its answer may be."""
    found = current.get()
    if found is None:
        yield
        return
    with found[1]:
        yield


class Records:
    """Makes a record of each request for `observers`; without any it does nothing."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer], keeps_texts: bool):
        self._app = app
        self._observers = observers
        self._keeps_texts = keeps_texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._observers:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        peer = f"{client[0]}:{client[1]}" if client else "-"
        record = Record(
            scope["method"], scope["path"], peer, Headers(scope=scope), scope.get("server"), self._keeps_texts
        )
        if found := _TRACEPARENT.fullmatch(record.headers.get("traceparent", "")):
            record.trace_id = found[1]
        hold = _Hold(record, self._observers)
        complete = False

        async def receive_noting() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                record.client_gone = True
            return message

        async def send_noting(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.request_id = Headers(raw=message["headers"]).get("x-request-id", "")
            else:
                complete = not message.get("more_body", False)
            await send(message)

        before = current.set((record, hold))
        try:
            with hold:
                await self._app(scope, receive_noting, send_noting)
        finally:
            current.reset(before)
