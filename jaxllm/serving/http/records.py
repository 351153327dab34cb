"""A record of each HTTP request (who, what, how long, how many tokens) and its line of the log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.engine.messages import TokenDelta
from jaxllm.logs import FIELDS
from jaxllm.requests.sampling import SamplingParams

LOG = "jaxllm.requests"
logger = logging.getLogger(LOG)

PROBES = frozenset({"/livez", "/health", "/ping", "/ready", "/readyz", "/load", "/metrics"})
"""Routes that are asked every few seconds: a line tells of them only where they fail."""


RECORD = "jaxllm.record"
"""The place of a request's record in its scope, where anybody wants to have one."""

Observer = Callable[["Record"], None]
"""Called with each record that is complete."""


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
    num_answers: int = 0
    prompt_tokens: int = 0
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

    A context that may be entered several times at once: the last exit ends the record and shows it to its observers.

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
    observers: Sequence[Observer] = ()
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
    _start: float = field(default_factory=time.monotonic)
    _num_open: int = 0

    def __enter__(self) -> Record:
        self._num_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.ended, self.seconds = time.time(), time.monotonic() - self._start
            for observer in self.observers:
                observer(self)

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
            scope["method"],
            scope["path"],
            peer,
            Headers(scope=scope),
            scope.get("server"),
            self._observers,
            self._keeps_texts,
        )
        if found := _TRACEPARENT.fullmatch(record.headers.get("traceparent", "")):
            record.trace_id = found[1]
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

        with record:
            await self._app({**scope, RECORD: record}, receive_noting, send_noting)


@dataclass
class Phases:
    """How long each took, in seconds; None is what has not been measured yet.

    Attributes:
        queue: from the request's arrival to the first step that ran it.
        prefill: from there to its first token.
        decode: from there to its last token so far.
        padding: its share of the padding rows that its steps ran, once a sequence of it has ended.
        num_answers: the sequences that `decode` is of.
    """

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    padding: float | None = None
    num_answers: int = 0

    def __add__(self, other: Phases) -> Phases:
        return Phases(
            _sum(self.queue, other.queue),
            _sum(self.prefill, other.prefill),
            _sum(self.decode, other.decode),
            _sum(self.padding, other.padding),
            self.num_answers + other.num_answers,
        )


@dataclass
class Clock:
    """When a request came, when its first sequence began to run, and when its first and its last token so far came.

    Seconds since the epoch.
    """

    arrival: float
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    padding: float | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        now = time.time()
        self.scheduled = self.scheduled or delta.first_scheduled_time
        if delta.token_ids:
            self.first, self.last = self.first or now, now
        if delta.finish_reason is not None:
            self.padding = _sum(self.padding, delta.padding)

    def phases(self, num_answers: int) -> Phases:
        """Of a request with that many sequences."""
        return Phases(
            _between(self.arrival, self.scheduled),
            _between(self.scheduled, self.first),
            _between(self.first, self.last),
            self.padding,
            num_answers,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def log_request(record: Record) -> None:
    """Write the line, in text or in JSON: prompts and answers are in the latter alone, if the record has them."""
    if record.path in PROBES and record.status < 400:
        return
    line = f'{record.client} "{record.method} {quote(record.path)}" {record.status}, request {record.request_id}'
    logger.info("%s%s", line, _spent(record), extra={FIELDS: fields(record)})


def fields(record: Record) -> dict[str, Any]:
    """What a log's reader looks for by name; null is what the request has not."""
    phases, calls = record.phases, record.calls
    found: dict[str, Any] = {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "method": record.method,
        "endpoint": record.path,
        "status": record.status,
        "client": record.client,
        "client_gone": record.client_gone,
        "key": record.key_name,
        "model": record.model,
        "duration_seconds": round(record.seconds, 6),
        "input_tokens": sum(call.prompt_tokens for call in calls),
        "cached_tokens": sum(call.cached_tokens for call in calls),
        "output_tokens": sum(call.completion_tokens for call in calls),
        "queue_seconds": _rounded(phases.queue),
        "prefill_seconds": _rounded(phases.prefill),
        "decode_seconds": _rounded(phases.decode),
        "finish_reasons": record.finish_reasons,
    }
    if record.keeps_texts:
        found["prompts"] = [text for call in calls for text in call.prompts]
        found["answers"] = [text for call in calls for text in call.answers]
    return found


def _spent(record: Record) -> str:
    """ ", 12 tokens in (3 cached), 5 out, queue 0.001 s, prefill 0.020 s, decode 0.100 s, stop", or nothing"""
    told = fields(record)
    parts = []
    if record.calls:
        parts.append(f"{told['input_tokens']} tokens in ({told['cached_tokens']} cached)")
        parts.append(f"{told['output_tokens']} out")
        for name in ("queue", "prefill", "decode"):
            seconds = told[f"{name}_seconds"]
            parts += [] if seconds is None else [f"{name} {seconds:.3f} s"]
        parts += dict.fromkeys(record.finish_reasons)
    if record.client_gone:
        parts.append("the client went away")
    return "".join(f", {part}" for part in parts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
