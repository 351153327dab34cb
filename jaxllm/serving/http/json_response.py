"""JSON responses encoded by msgspec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import Response

from jaxllm.serving.http.request_model import ignored_fields


def json_response(
    value: msgspec.Struct | Sequence[msgspec.Struct],
    *,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`value` as the answer, with a `warnings` member where fields of the request were ignored.

    A list has no place for members: its warnings are in the header X-Warnings, as JSON.
    """
    named = {"X-Request-Id": request_id} if request_id else {}
    content = msgspec.json.encode(value)
    warnings = ignored_fields.get()
    if warnings and isinstance(value, Sequence):
        named["X-Warnings"] = json.dumps(warnings)
    elif warnings:
        content = content[:-1] + b',"warnings":' + msgspec.json.encode(warnings) + b"}"
    return Response(content, media_type="application/json", headers={**named, **(headers or {})})
