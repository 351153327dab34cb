"""What went wrong with a tool server, in words that people and models can use."""

from __future__ import annotations

import http.client
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jaxllm.mcp.settings import ServerSettings

TIMED_OUT = -32001
CLOSED = -32000
_TERMINATED = "Session terminated"
"""What the SDK says of a session that its server, started anew perhaps, no longer knows."""

_NO_REASON = ("Server returned an error response", "Not Found")
"""What it says where a server gave a status of HTTP and no more."""

failed_statuses: ContextVar[list[int] | None] = ContextVar("failed_statuses", default=None)
"""Where statuses of refusals over HTTP are noted, for what the current task asks: the SDK keeps them to itself."""


class BadServer(Exception):
    """A server does what no server should; says what."""


class Lost(Exception):
    """Nothing more will be heard of the server."""


@dataclass
class Problem:
    """`type` and `code` are those of the errors in OpenAI's mcp_call items."""

    type: str
    code: int
    message: str

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self.code == CLOSED

    @property
    def forgotten(self) -> bool:
        """Whether the server did not know our session: it did nothing, and another session may."""
        return self.message == _TERMINATED

    def for_openai(self) -> dict[str, Any]:
        return {"type": self.type, "code": self.code, "message": self.message}


def problem(error: BaseException, settings: ServerSettings) -> Problem:
    """What an exception of the SDK's, or of a transport's, means; without secrets."""
    import httpx2
    from mcp import MCPError

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    statuses = failed_statuses.get() or []
    match error:
        case Lost():
            return _protocol(CLOSED, "the connection was lost", settings)
        case BadServer():
            return _protocol(-32603, str(error), settings)
        case TimeoutError():
            return _protocol(TIMED_OUT, f"it did not answer within {settings.timeout:g} s", settings)
        case MCPError() if error.error.code == TIMED_OUT:
            return _protocol(TIMED_OUT, f"it did not answer within {settings.timeout:g} s", settings)
        case MCPError() if statuses and error.error.message in _NO_REASON:
            return _refused(statuses[-1])
        case MCPError():
            return _protocol(error.error.code, error.error.message, settings)
        case httpx2.HTTPStatusError():
            return _refused(error.response.status_code)
        case httpx2.ConnectError() | httpx2.ConnectTimeout():
            return Problem("http_error", CLOSED, settings.shown(f"it cannot be reached: {error or 'no answer'}"))
        case httpx2.HTTPError():
            return Problem(
                "http_error", CLOSED, settings.shown(f"the connection broke: {error or type(error).__name__}")
            )
        case FileNotFoundError() | PermissionError() | NotADirectoryError():
            where = f" in {settings.cwd}" if settings.cwd else ""
            reason = (error.strerror or "").lower()
            return _protocol(-32603, f"the command {settings.command!r} cannot be started{where}: {reason}", settings)
        case _:
            return _protocol(-32603, str(error) or type(error).__name__, settings)


def _protocol(code: int, message: str, settings: ServerSettings) -> Problem:
    return Problem("mcp_protocol_error", code, settings.shown(message))


def _refused(status: int) -> Problem:
    phrase = http.client.responses.get(status, "")
    return Problem("http_error", status, f"it answered {status} {phrase}".strip())
