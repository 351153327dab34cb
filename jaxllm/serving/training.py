"""Routes that stop a model: vLLM's for sleep, and a trainer's, who generates between changes of its weights."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Query, Request, Response

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.serving.access.keys import check_admin, tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.loadable import LoadableModel
from jaxllm.serving.registry import ModelName, Registry
from jaxllm.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JSONRoute, tags=["training"])

MAX_PATH = 4096
CHANGES = "pause models and change their weights"
RunningRequests = Annotated[
    Literal["abort", "wait", "keep"],
    Query(description="What becomes of running requests: they are ended, waited for, or stop where they are."),
]
ClearCache = Annotated[
    bool, Query(description="Whether later requests find nothing in the prefix cache; not looked at with `keep`.")
]

sleeping_router = APIRouter(route_class=JSONRoute, tags=["models"])
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


class UpdateWeightsRequest(RequestModel):
    model_path: Annotated[str, pydantic.Field(min_length=1, max_length=MAX_PATH)]
    """A folder or file on the server's machine, or a hub id: the same model with other weights."""
    weight_version: Annotated[str, pydantic.Field(min_length=1, max_length=256)] | None = None
    """What the new weights are called; by default they are numbered."""
    model: str | None = None
    """The model that is to run with them; by default the first."""


class State(msgspec.Struct):
    status: str


class Paused(msgspec.Struct):
    is_paused: bool


class CacheReset(msgspec.Struct):
    success: bool = True


class WeightInfo(msgspec.Struct):
    weight_version: str | None
    """Null where the model is not loaded."""


async def _model(request: Request, name: str | None) -> ServedModel:
    """It is loaded if it is not."""
    check_admin(request, CHANGES)
    return (await open_call(request, name)).model


@router.post("/pause", responses=returns(State))
async def pause(
    request: Request, mode: RunningRequests = "abort", clear_cache: ClearCache = True, model: ModelName = None
) -> Response:
    """Run no steps until /resume; answers when none runs any more.

    Requests that come meanwhile wait with `keep`, and are refused with 503 otherwise.
    """
    served = await _model(request, model)
    if mode == "abort":
        for running in list(served.running):
            message = "the model was paused before the answer was complete"
            running.abort(unavailable(message, code="engine_paused"))
    await asyncio.to_thread(served.engine.pause, mode)
    if clear_cache and mode != "keep":
        await asyncio.to_thread(served.engine.reset_prefix_cache)
    return json_response(State("paused"))


@router.post("/resume", responses=returns(State))
async def resume(request: Request, model: ModelName = None) -> Response:
    """Go on after /pause."""
    served = await _model(request, model)
    await asyncio.to_thread(served.engine.resume)
    return json_response(State("resumed"))


@router.get("/is_paused", responses=returns(Paused))
async def is_paused(request: Request, model: ModelName = None) -> Response:
    """Whether a model is paused; loads nothing."""
    served = _find(request, model).served
    return json_response(Paused(served is not None and served.engine.is_paused))


@router.post("/reset_prefix_cache", responses=returns(CacheReset))
async def reset_prefix_cache(request: Request, model: ModelName = None) -> Response:
    """Later requests find nothing in the prefix cache. Running ones go on with what they hold."""
    served = await _model(request, model)
    await asyncio.to_thread(served.engine.reset_prefix_cache)
    return json_response(CacheReset())


@router.post("/update_weights", responses=returns(WeightInfo))
async def update_weights(body: UpdateWeightsRequest, request: Request) -> Response:
    """Exchange a model's weights between two steps; answers when it runs with them.

    Where they cannot be used it keeps those it has. Running requests go on with the new ones, unless it is paused.
    """
    served = await _model(request, body.model)
    try:
        version = await asyncio.to_thread(served.engine.update_weights, body.model_path, version=body.weight_version)
    except (CheckpointError, ConfigError) as error:
        raise APIError(400, str(error), param="model_path", code="weights_refused") from None
    logger.info("model %s runs with the weights of %s, version %s", served.names[0], body.model_path, version)
    return json_response(WeightInfo(version))


@router.get("/weight_info", responses=returns(WeightInfo))
async def weight_info(request: Request, model: ModelName = None) -> Response:
    """What a model's weights are called; loads nothing."""
    served = _find(request, model).served
    return json_response(WeightInfo(None if served is None else served.engine.weight_version))


def _find(request: Request, model: str | None) -> LoadableModel:
    registry: Registry = request.app.state.server.registry
    return registry.find(model, tenant_of(request))


class Done(msgspec.Struct):
    success: bool = True


class Sleeping(msgspec.Struct):
    is_sleeping: bool


@sleeping_router.post("/sleep", responses=returns(Done))
async def sleep(request: Request, level: Level = 1, mode: Mode = "abort", model: ModelName = None) -> Response:
    """Give back the devices' memory that a model takes; answers when it is free. The next request wakes it up."""
    check_admin(request)
    registry: Registry = request.app.state.server.registry
    await registry.loader.sleep(registry.find(model, tenant_of(request)), level, wait=mode == "wait")
    return json_response(Done())


@sleeping_router.post("/wake_up", responses=returns(Done))
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


@sleeping_router.get("/is_sleeping", responses=returns(Sleeping))
async def is_sleeping(request: Request, model: ModelName = None) -> Response:
    """Whether a model sleeps; wakes nothing."""
    registry: Registry = request.app.state.server.registry
    return json_response(Sleeping(registry.find(model, tenant_of(request)).state == "sleeping"))
