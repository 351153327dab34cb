"""JSON responses encoded by msgspec."""

from __future__ import annotations

import msgspec
from fastapi import Response


def json_response(value: msgspec.Struct, *, request_id: str | None = None) -> Response:
    headers = {"X-Request-Id": request_id} if request_id else None
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)
