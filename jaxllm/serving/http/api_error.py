"""The exception that becomes an answer; processes that read bodies raise it too, and need no web framework for that."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxllm.errors import StorageFullError

RETRY_AFTER_SECONDS = "1"
_SHOWN_PATH_LENGTH = 300
_DISK_FULL = "53100"  # PostgreSQL's code


class APIError(Exception):
    """An error with everything its HTTP response needs; its `reason` is the message without the place in the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        place: str = "",
    ):
        """The message begins with the `place`, which says where in the body something is wrong."""
        self.reason = message
        message = f"{place}: {message}" if place else message
        super().__init__(message)
        self.status = status
        self.headers = headers
        param = param and param[:_SHOWN_PATH_LENGTH]  # which may be a name that a client made up
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


def unavailable(message: str, code: str) -> APIError:
    """503: the same request may succeed later."""
    return APIError(503, message, type="server_error", code=code, headers={"Retry-After": RETRY_AFTER_SECONDS})


@contextmanager
def telling_full() -> Iterator[None]:
    """Raises StorageFullError where a file or a database that is written to inside finds the disk full."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", error)  # of one of SQLAlchemy's the driver's own
        full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        full |= getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        full |= getattr(cause, "sqlstate", None) == _DISK_FULL
        if not full:
            raise
        message = "the server has no room to store this; delete files, or ask its operator"
        raise StorageFullError(message) from None


def dotted(path: Sequence[str | int]) -> str:
    """('messages', 0, 'content') -> 'messages[0].content'"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        if len(text) > _SHOWN_PATH_LENGTH:
            return text[:_SHOWN_PATH_LENGTH]
    return text
