"""/sleep, /wake_up and /is_sleeping, as vLLM has them in its developers' mode."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from jaxllm.serving.access.tenant import check_admin, tenant_of
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.registry import ModelName, Registry

router = APIRouter(route_class=JSONRoute, tags=["models"])

ALL_TAGS = frozenset({"weights", "kv_cache"})
Level = Annotated[
    int, Query(ge=1, le=2, description="1 keeps the weights in the host's memory; 2 has them read from files again.")
]
Mode = Annotated[
    Literal["abort", "wait"], Query(description="What becomes of running requests: they are ended, or waited for.")
]
WakeTags = Annotated[
    list[Literal["weights", "kv_cache"]] | None, Query(description="Both, or none: they are woken up together.")
]


class Done(msgspec.Struct):
    success: bool = True


class Sleeping(msgspec.Struct):
    is_sleeping: bool


@router.post("/sleep", responses=returns(Done))
async def sleep(request: Request, level: Level = 1, mode: Mode = "abort", model: ModelName = None) -> Response:
    """Give back the devices' memory that a model takes; answers when it is free. The next request wakes it up."""
    check_admin(request)
    registry: Registry = request.app.state.server.registry
    await registry.loader.sleep(registry.find(model, tenant_of(request)), level, wait=mode == "wait")
    return json_response(Done())


@router.post("/wake_up", responses=returns(Done))
async def wake_up(request: Request, tags: WakeTags = None, model: ModelName = None) -> Response:
    """Wake a model up; answers when it can run requests. Does nothing where it does not sleep."""
    if tags and set(tags) != ALL_TAGS:
        message = f"tags is {tags}; weights and kv_cache are woken up together: send both, or none"
        raise APIError(400, message, param="tags")
    registry: Registry = request.app.state.server.registry
    found = registry.find(model, tenant_of(request))
    if found.served is not None and not found.is_awake:
        await registry.loader.load(found)
    return json_response(Done())


@router.get("/is_sleeping", responses=returns(Sleeping))
async def is_sleeping(request: Request, model: ModelName = None) -> Response:
    """Whether a model sleeps; wakes nothing."""
    registry: Registry = request.app.state.server.registry
    return json_response(Sleeping(registry.find(model, tenant_of(request)).state == "sleeping"))
