"""The audit log: who has called what, and what became of it; no text of a request or an answer."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import ConfigError, reason
from jaxllm.folders import in_home
from jaxllm.serving.http.middleware import ID_HEADER
from jaxllm.serving.http.route import NOTED

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
REFUSALS = (400, 401, 403, 404, 405, 421)
"""What is logged although no route of the API has been reached."""


class AuditLog:
    """A file of JSON lines, written on a thread of its own, so that no request waits for the disk.

    Raises ConfigError where it cannot be written.
    """

    def __init__(self, path: Path):
        self._path = in_home(path)
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        try:
            self._file = _File(self._path)
        except OSError as error:
            raise ConfigError(f"audit_log is {str(path)!r}: {reason(error)}") from None
        self._writer = logging.handlers.QueueListener(self._waiting, self._file)
        self._writer.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Queue an entry; the writer sees to the rest."""
        line = json.dumps(entry, ensure_ascii=False)
        self._waiting.put(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))

    def reopen(self) -> None:
        """Go on in the file that has the name now, where another program has moved the old one away.

        Where that cannot be opened the log says so, and the old file is written on.
        """
        try:
            self._file.reopen()
        except OSError as error:
            logger.error("the audit log stays where it is: %s: %s", self._path, reason(error))
        else:
            logger.info("the audit log goes on in %s", self._path)

    def close(self) -> None:
        """Write what is queued, and no more."""
        self._writer.stop()
        self._file.close()


class _File(logging.FileHandler):
    """Appends lines to a file that this user alone may read."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")

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


class Audited:
    """Writes an entry for each request to a route of the API when it has been answered, and for each refusal."""

    def __init__(self, app: ASGIApp, *, log: AuditLog):
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = datetime.now(UTC)
        noted: dict[str, Any] = {}
        status, request_id = CLIENT_GONE, None

        async def send_noted(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status, request_id = message["status"], Headers(raw=message["headers"]).get(ID_HEADER)
            await send(message)

        try:
            await self._app({**scope, NOTED: noted}, receive, send_noted)
        finally:
            if noted or status in REFUSALS:
                client = scope.get("client")
                self._log.write(
                    {
                        "time": began.isoformat(timespec="milliseconds"),
                        "key": noted.get("key"),
                        "address": client[0] if client else None,
                        "method": scope["method"],
                        "route": noted.get("route"),
                        "model": noted.get("model"),
                        "status": status,
                        "id": request_id,
                    }
                )
