"""/usage"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from jaxllm.serving.access.tenant import tenant_of
from jaxllm.serving.access.usage_store import UsageStore
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute

router = APIRouter(route_class=JSONRoute, tags=["status"])

DAYS_SHOWN = 30


class UsageOfDay(msgspec.Struct, kw_only=True):
    """In the words of OpenAI's usage API."""

    object: Literal["usage"] = "usage"
    date: str
    model: str
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int


class UsageList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    api_key: str | None
    """The name of the key that asks; null where it has none."""
    data: list[UsageOfDay]


@router.get("/usage", responses=returns(UsageList))
async def usage(
    request: Request,
    since: Annotated[date | None, Query(description="The first day, as 2027-01-31; by default 30 days ago.")] = None,
    until: Annotated[date | None, Query(description="The last day; by default today. Days are those of UTC.")] = None,
) -> Response:
    """What the key that asks has used, by day and model; without a file of keys what all have used since the start."""
    store: UsageStore = request.app.state.usage
    owner = tenant_of(request).name
    last = until or datetime.now(UTC).date()
    first = since or last - timedelta(days=DAYS_SHOWN)
    if first > last:
        raise APIError(400, f"since is {first} and until is {last}: since may not be the later day", param="since")
    found = await store.of(owner, first.isoformat(), last.isoformat())
    data = [
        UsageOfDay(
            date=account.day,
            model=account.model,
            num_model_requests=used.requests,
            input_tokens=used.prompt_tokens,
            input_cached_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
        )
        for account, used in found
    ]
    return json_response(UsageList(api_key=owner, data=data))
