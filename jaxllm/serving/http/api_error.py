"""The exception that becomes an answer; processes that read bodies raise it too, and need no web framework for that."""

from __future__ import annotations

from collections.abc import Sequence

RETRY_AFTER_SECONDS = "1"
_SHOWN_PATH_LENGTH = 300


class APIError(Exception):
    """An error with everything its HTTP response needs.

    Attributes:
        reason: the message without the place in the body that it may begin with.
    """

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
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


def unavailable(message: str, code: str) -> APIError:
    """503: the same request may succeed later."""
    return APIError(503, message, type="server_error", code=code, headers={"Retry-After": RETRY_AFTER_SECONDS})


def dotted(path: Sequence[str | int]) -> str:
    """('messages', 0, 'content') -> 'messages[0].content'"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        if len(text) > _SHOWN_PATH_LENGTH:
            return text[:_SHOWN_PATH_LENGTH]
    return text
