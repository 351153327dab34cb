"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response

from jaxllm.serving.anthropic.response import AnthropicError, AnthropicErrorResponse
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import JSONRoute, bearer_key

OVERLOADED = 529

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", OVERLOADED: "overloaded_error",
}  # fmt: skip


def status_of(error: APIError) -> int:
    """Anthropic's clients know 529 for a server that cannot answer now, not 503."""
    return OVERLOADED if error.status == 503 else error.status


def error_response(error: APIError) -> AnthropicErrorResponse:
    """The shape has no place for the field's name, so the message begins with it unless it says it anyway."""
    status, message, param = status_of(error), str(error), error.body["error"]["param"] or ""
    if param not in message:
        message = f"{param}: {error.reason}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return AnthropicErrorResponse(AnthropicError(type=kind, message=message))


class AnthropicRoute(JSONRoute):
    """A route that also takes its key as x-api-key, and whose errors have Anthropic's shape."""

    @staticmethod
    def sent_key(request: Request) -> str:
        return request.headers.get("x-api-key") or bearer_key(request)

    @staticmethod
    def error_event(body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"

    @staticmethod
    def error_response(error: APIError) -> Response:
        body = msgspec.json.encode(error_response(error))
        return Response(body, status_of(error), error.headers, media_type="application/json")
