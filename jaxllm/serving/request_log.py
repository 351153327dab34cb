"""The record of each HTTP request, its line of the log, and the audit log of who has called what."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import ConfigError, reason
from jaxllm.folders import in_home
from jaxllm.logs import FIELDS
from jaxllm.serving.http.middleware import HTTPLayer
from jaxllm.serving.http.route import RECORD
from jaxllm.serving.request_metrics import ModelCall, Phases

LOG = "jaxllm.requests"
logger = logging.getLogger(__name__)

PROBES = frozenset({"/livez", "/health", "/ping", "/ready", "/readyz", "/load", "/metrics"})
"""Routes that are asked every few seconds: a line tells of them only where they fail."""

Observer = Callable[["Record"], None]


@dataclass
class Record:
    """A request, from its first byte until its answer has been sent and work that outlives the answer has ended.

    A context that may be entered several times at once: the last exit ends the record and shows it to its observers.

    Attributes:
        client: its address and port, "-" where there is none.
        server: the address and port that it came to.
        keeps_texts: True if prompts and answers are to be kept.
        api_route, asked_model: a route of the API and a model as the audit log has them, once they are known.
        trace_id: of its caller's trace, or of one that begins here.
        status: of the answer; 499 where the client went away before there was one.
        client_gone: True if the client went away before the answer was complete.
        began, ended: seconds since the epoch.
        seconds: its duration, by a monotonic clock.
    """

    method: str
    path: str
    client: str
    headers: Headers
    server: tuple[str, int | None] | None = None
    observers: Sequence[Observer] = ()
    keeps_texts: bool = False
    route: str | None = None
    api_route: str | None = None
    key_name: str | None = None
    asked_model: str | None = None
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
    def finish_reasons(self) -> list[str]:
        return self.calls[-1].finish_reasons if self.calls else []

    @property
    def phases(self) -> Phases:
        return sum((call.clock.phases(call.num_answers) for call in self.calls), Phases())


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Records(HTTPLayer):
    """Makes a record of each request, for `observers` and for the audit log."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer], keeps_texts: bool, audit: AuditLog | None):
        super().__init__(app)
        self._observers = observers
        self._keeps_texts = keeps_texts
        self._audit = audit

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = ":".join(map(str, scope.get("client") or "-"))
        method, path, server = scope["method"], scope["path"], scope.get("server")
        record = Record(method, path, peer, Headers(scope=scope), server, self._observers, self._keeps_texts)
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
            try:
                await self.app({**scope, RECORD: record}, receive_noting, send_noting)
            finally:
                if self._audit is not None:
                    self._audit.write_request(record)


def log_request(record: Record) -> None:
    """Write the line, in text or in JSON: prompts and answers are in the latter alone, if the record has them."""
    if record.path in PROBES and record.status < 400:
        return
    line = f'{record.client} "{record.method} {quote(record.path)}" {record.status}, request {record.request_id}'
    logging.getLogger(LOG).info("%s%s", line, _spent(record), extra={FIELDS: fields(record)})


def fields(record: Record) -> dict[str, Any]:
    """The record's line in JSON; a field is null where the request has none of it."""
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
        "model": calls[-1].model if calls else None,
        "duration_seconds": round(record.seconds, 6),
        "input_tokens": sum(call.prompt_tokens for call in calls),
        "cached_tokens": sum(call.cached_tokens for call in calls),
        "output_tokens": sum(call.completion_tokens for call in calls),
        "queue_seconds": phases.queue and round(phases.queue, 6),
        "prefill_seconds": phases.prefill and round(phases.prefill, 6),
        "decode_seconds": phases.decode and round(phases.decode, 6),
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


REFUSALS = (400, 401, 403, 404, 405, 421)
"""Statuses that are logged although no route of the API has been reached."""


class AuditLog:
    """A file of JSON lines, written on a thread of its own. Raises ConfigError where it cannot be written."""

    def __init__(self, path: Path):
        self._path = in_home(path)
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        try:
            self._file = _File(self._path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"audit_log is {str(path)!r}: {reason(error)}") from None
        self._writer = logging.handlers.QueueListener(self._waiting, self._file)
        self._writer.start()

    def write_request(self, record: Record) -> None:
        """Queue the entry of a request to a route of the API that has been answered, or of a refusal."""
        if record.api_route is None and record.status not in REFUSALS:
            return
        entry = {
            "time": datetime.fromtimestamp(record.began, UTC).isoformat(timespec="milliseconds"),
            "key": record.key_name,
            "address": record.client.rpartition(":")[0] or None,
            "method": record.method,
            "route": record.api_route,
            "model": record.asked_model,
            "status": record.status,
            "id": record.request_id or None,
        }
        self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False)
        self._waiting.put(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))

    def reopen(self) -> None:
        """Go on in the file that has the name now; where that cannot be opened, log it and go on in the old one."""
        try:
            self._file.reopen()
        except OSError as error:
            logger.error("the audit log stays where it is: %s: %s", self._path, reason(error))
        else:
            logger.info("the audit log goes on in %s", self._path)

    def close(self) -> None:
        self._writer.stop()
        self._file.close()


class _File(logging.FileHandler):
    """Appends lines to a file that this user alone may read."""

    def _open(self) -> Any:
        return open(os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8")

    def reopen(self) -> None:
        with self.lock:  # type: ignore[union-attr]
            opened = self._open()
            self.stream, old = opened, self.stream
            old.close()

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that could not be written, of a full disk for example, is told of in the log, with what it says."""
        logger.exception("the audit log cannot be written: %s", record.getMessage())
