"""An API route: the key and the body before it runs, and its answer as it is sent, as events or after comments."""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.formparsers import MultiPartParser
from starlette.types import Message, Receive, Scope, Send

from jaxllm.serving.http import json_body
from jaxllm.serving.http.answers import ignored_fields, to_api_error
from jaxllm.serving.http.api_error import APIError, telling_full
from jaxllm.serving.http.documents import MAX_FILES, file_parts, tell
from jaxllm.wording import did_you_mean, shown

logger = logging.getLogger(__name__)

FILE_WORDS = (b'file"', b"document", b"\\u")
"""One is in each small body with a file in it, if only as an escaped character."""

T = TypeVar("T")
Gained = TypeVar("Gained")
Gaining = TypeVar("Gaining", contravariant=True)

_encode = msgspec.json.Encoder().encode

KEEP_ALIVE = b": keep-alive\n\n"
NOTICE_SECONDS = 1.0  # before a stream begins with a comment: a failure within it has a status of its own
LOOK_SECONDS = 0.5  # between two looks at the work, for another comment where that has changed

# Keys of a request's scope: its tenant, its answer, and its record if one is kept.
TENANT = "jaxllm.tenant"
ANSWER = "jaxllm.answer"
RECORD = "jaxllm.record"
YIELDS = "jaxllm.yields"
"""It is in the scope of a request that makes no busy model give up its place: a line of a batch."""


class ParsedRequest(Request):
    """A request whose body has been read and parsed; one that has been validated too is an instance of its model."""

    def __init__(self, scope: Scope, receive: Receive, value: Any):
        super().__init__(scope, receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # it is not empty: that is all that anybody asks

    async def json(self) -> Any:
        return self._value


class JSONRoute(APIRoute):
    """A route behind the API key whose body is one JSON object of limited size.

    Raises APIError: 401 wrong or missing key, 413 too large, 415 not JSON by its Content-Type (so that no page in a
    browser can post here without the CORS check), 400 with line and column when the JSON is malformed.
    """

    largest_body = sys.maxsize

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request's call ends when its answer is sent, its client is gone or it has failed."""
        if RECORD in scope:
            scope[RECORD].note_route(self.path)
        silence = scope["app"].state.server.config.sse_keep_alive
        answer = scope[ANSWER] = Answer(send, self.error_event, silence)
        async with answer.held:
            await super().handle(scope, receive, answer.send)

    @staticmethod
    def error_event(body: bytes) -> bytes:
        """The event by which a stream that has begun tells of an error, whose answer would have been `body`."""
        return b"data: " + body + b"\n\ndata: [DONE]\n\n"

    @staticmethod
    def sent_key(request: Request) -> str:
        return bearer_key(request)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            state = request.app.state.server
            let_in(request, self.sent_key(request))
            if self.body_field is None:
                return await handler(request)
            with state.body_memory.share() as share:
                pieces = await json_body.read_body(request, min(state.config.max_body_size, self.largest_body), share)
                ignored_fields.set([] if state.config.unknown_fields == "warn" else None)
                is_large = sum(map(len, pieces)) > json_body.SMALL_BODY
                read = state.read_large(state.bodies.read, pieces) if is_large else None
                data = b"".join(pieces) if read is None else b""
                value = self._parsed(data) if read is None else await read
                parts = []
                if is_large:
                    parts = await asyncio.to_thread(list, file_parts(value))
                elif any(word in data for word in FILE_WORDS):  # few bodies are searched
                    parts = list(file_parts(value))
                if len(parts) > MAX_FILES:
                    raise APIError(400, f"a request may have {MAX_FILES} files; this one has {len(parts)}")
                for part, place in parts:
                    await tell(request.app.state.batches.files, request.scope[TENANT].name, part, place)
                if is_large:
                    value = await state.read_large(self._validated, value)
            return await handler(ParsedRequest(request.scope, request.receive, value))

        return handle

    @staticmethod
    def _parsed(raw: bytes) -> Any:
        value = json_body.parse_object(raw)
        if json_body.may_overflow(raw):
            json_body.check_numbers(value)
        return value

    def _validated(self, value: Any) -> Any:
        assert self.body_field is not None
        validated, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        return validated


def bearer_key(request: Request) -> str:
    """The key of the Authorization header, or an empty string."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def let_in(request: Request, sent: str) -> None:
    """Note in whose name a request comes, unless the server itself sends it and has said so. Raises APIError 401."""
    record = request.scope.get(RECORD)
    if record is not None:
        record.api_route = request.scope["route"].path
    if TENANT not in request.scope:
        request.scope[TENANT] = request.app.state.server.keys.check(sent)
    if record is not None:
        record.key_name = request.scope[TENANT].name


class ListRoute(JSONRoute):
    """As JSONRoute, but for a list of at most SMALL_BODY bytes."""

    largest_body = json_body.SMALL_BODY

    @staticmethod
    def _parsed(raw: bytes) -> Any:
        value = json_body.parse_json(raw)
        if not isinstance(value, list):
            raise APIError(400, f"the body is {shown(value)}; it must be a JSON list", code="invalid_json")
        json_body.check_numbers(value)
        return value


FORM_OVERHEAD = 64 * 1024  # bytes that the form may need beside its file
MAX_FIELD_SIZE = 16 * 1024
MultiPartParser.spool_max_size = json_body.SMALL_BODY  # of an upload that stays in memory; the rest goes to disk


class MultipartRoute(APIRoute):
    """A route behind the API key whose body is a multipart form with one file of limited size.

    Raises APIError: 401 wrong or missing key, 413 too large, 415 not a form by its Content-Type, 400 when the form is
    malformed or has a field that the route does not know or has it twice. Raises StorageFullError.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        fields = [field.alias for field in self.dependant.body_params]

        async def handle(request: Request) -> Response:
            state = request.app.state.server
            let_in(request, bearer_key(request))
            limit = state.config.max_file_size
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "multipart/form-data":
                raise APIError(415, f"Content-Type is {content_type!r}; it must be multipart/form-data")
            declared = request.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limit + FORM_OVERHEAD:
                raise too_large(limit)
            limited = Request(request.scope, _limited(request.receive, limit))
            with telling_full():
                async with limited.form(max_files=1, max_fields=16, max_part_size=MAX_FIELD_SIZE) as form:
                    _check_fields(Counter(name for name, _ in form.multi_items()), fields)
                    return await handler(limited)

        return handle


def too_large(limit: int) -> APIError:
    message = f"the file is larger than {limit} bytes, the most this server takes"
    return APIError(413, message, param="file", code="file_too_large", headers={"Connection": "close"})


def _limited(receive: Receive, limit: int) -> Receive:
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit + FORM_OVERHEAD:
            raise too_large(limit)
        return message

    return receive_some


def _check_fields(sent: Counter[str], known: list[str]) -> None:
    for name, times in sent.items():
        if name not in known:
            raise APIError(400, f"unknown field {shown(name)}{did_you_mean(name, known)}", param=name)
        if times > 1:
            raise APIError(400, f"{name} is given {times} times; give it once", param=name)


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class EventStream(Response):
    """Sends events as they come, and `keep_alive` for each empty list."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        events: AsyncIterator[list[bytes]],
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ):
        self._request_id = request_id
        self._events = events
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": request_id}
        self.init_headers({**fixed, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._stream(send))
        except ClientDisconnected:
            logger.debug("client of %s went away", self._request_id)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as lists:  # type: ignore[type-var]
            async for events in lists:
                body = b"".join(events) or self._keep_alive
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client goes away. Raises ClientDisconnected then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]  # fmt: skip


class Answer:
    """A route's answer as it is sent: comments may go ahead of it.

    After a comment only a stream's events are sent; another body, which tells of an error, becomes an event by
    `error_event`.

    Attributes:
        silence: seconds between two comments that say the same.
        headers: more of them, added when the answer begins.
        held: ends after the answer's last byte.
        has_call: True once the request has opened its call of a model.
    """

    def __init__(self, send: Send, error_event: Callable[[bytes], bytes], silence: float):
        self._send = send
        self._error_event = error_event
        self.silence = silence
        self.headers: dict[str, str] = {}
        self.held = AsyncExitStack()
        self.has_call = False
        self._begun = False
        self._error: bytearray | None = None

    @staticmethod
    def of(request: Request) -> Answer:
        answer: Answer = request.scope[ANSWER]
        return answer

    async def comment(self, text: str) -> None:
        """Send a line that clients leave unread."""
        if not self._begun:
            self._begun = True
            await self._start({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        line = " ".join(text.split())
        await self._send({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start and not self._begun:
            await self._start(message)
        elif is_start:
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                event = self._error_event(bytes(self._error))
                await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, message: Message) -> None:
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await self._send({**message, "headers": [*message.get("headers", ()), *more]})


async def telling(answer: Answer, work: Coroutine[Any, Any, T], doing: Callable[[], str]) -> T:
    """Await `work`; what it is `doing` is told in comments, at each change and after each silence."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=NOTICE_SECONDS)
        told, silent = "", 0.0
        while not done:
            text = doing()
            if text != told or silent >= answer.silence:
                await answer.comment(text)
                told, silent = text, 0.0
            done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
            silent += LOOK_SECONDS
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class AnswerSource(Protocol[Gained]):
    """The source of an answer, such as a Generation: an async context, within which it arrives."""

    id: str

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *raised: object) -> Any: ...

    def arrivals(self, timeout: float | None = None) -> AsyncIterator[list[tuple[int, Gained]]]:
        """The gains of choices, as (index, gain); an empty list after `timeout` seconds of silence."""


def server_sent(event: msgspec.Struct) -> bytes:
    """b'event: response.created\\ndata: {"type":"response.created",…}\\n\\n': an event that is named as its tag."""
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"


class ChunkWriter(ABC, Generic[Gaining]):
    """Turns what choices gain into the chunks of one API; by default events without a name, as OpenAI's."""

    done: bytes = b"data: [DONE]\n\n"
    """The end of a stream."""
    keep_alive: bytes = KEEP_ALIVE
    """The filling of its silence."""

    def first(self) -> Iterable[msgspec.Struct]:
        """Chunks to send before any token exists."""
        return ()

    @abstractmethod
    def chunks(self, index: int, delta: Gaining) -> Iterable[msgspec.Struct]:
        """Chunks for what one choice gained."""

    def last(self) -> Iterable[msgspec.Struct]:
        """Chunks to send when every choice has finished."""
        return ()

    def encode(self, chunk: msgspec.Struct) -> bytes:
        """One chunk as a server-sent event."""
        return b"data: " + _encode(chunk) + b"\n\n"

    def error(self, error: APIError) -> bytes:
        """The event that tells of an error in mid-stream."""
        return b"data: " + _encode(error.body) + b"\n\n"


async def chunks_of(
    generation: AnswerSource[Gained], writer: ChunkWriter[Gained], silence: float
) -> AsyncIterator[list[bytes]]:
    try:
        first = [writer.encode(chunk) for chunk in writer.first()]
        if first:
            yield first
        async for events in generation.arrivals(silence):
            sent = [writer.encode(chunk) for index, delta in events for chunk in writer.chunks(index, delta)]
            if sent or not events:
                yield sent
        last = [*(writer.encode(chunk) for chunk in writer.last()), writer.done]
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.status == 500:
            logger.exception("%s failed while streaming", generation.id)
        last = [writer.error(api_error), writer.done]
    if any(last):
        yield last
