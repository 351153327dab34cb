"""Routes that change a running model: sleep, a trainer's pauses and weights, and LoRA adapters."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from jaxllm.chat.conversation import naming
from jaxllm.config.values import SERVED_NAME, is_served_name
from jaxllm.errors import CheckpointError, ConfigError, Field, InvalidRequestError, ModelNotFoundError
from jaxllm.serving.access.keys import check_admin, tenant_of
from jaxllm.serving.adapters import check_adapter
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute, ListRoute
from jaxllm.serving.openai.sampling import MAX_ADAPTERS, AdapterScale, adapter_scales
from jaxllm.serving.served_model import LoadableModel, ServedModel
from jaxllm.serving.state import ModelName, Registry, ServerState
from jaxllm.weights.source import resolve_adapter
from jaxllm.wording import shown

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


class Done(msgspec.Struct):
    success: bool = True


class Paused(msgspec.Struct):
    is_paused: bool


class WeightInfo(msgspec.Struct):
    weight_version: str | None
    """Null where the model is not loaded."""


def _find(request: Request, model: str | None) -> LoadableModel:
    registry: Registry = request.app.state.server.registry
    return registry.find(model, tenant_of(request))


async def _model(request: Request, name: str | None) -> ServedModel:
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


@router.post("/reset_prefix_cache", responses=returns(Done))
async def reset_prefix_cache(request: Request, model: ModelName = None) -> Response:
    """Later requests find nothing in the prefix cache. Running ones go on with what they hold."""
    served = await _model(request, model)
    await asyncio.to_thread(served.engine.reset_prefix_cache)
    return json_response(Done())


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


class Sleeping(msgspec.Struct):
    is_sleeping: bool


@sleeping_router.post("/sleep", responses=returns(Done))
async def sleep(request: Request, level: Level = 1, mode: Mode = "abort", model: ModelName = None) -> Response:
    """Give back the devices' memory that a model takes; answers when it is free. The next request wakes it up."""
    check_admin(request)
    registry: Registry = request.app.state.server.registry
    await registry.loader.sleep(_find(request, model), level, wait=mode == "wait")
    return json_response(Done())


@sleeping_router.post("/wake_up", responses=returns(Done))
async def wake_up(request: Request, tags: WakeTags = None, model: ModelName = None) -> Response:
    """Wake a model up; answers when it can run requests. Does nothing where it does not sleep."""
    if tags and set(tags) != ALL_TAGS:
        message = f"tags is {tags}; weights and kv_cache are woken up together: send both, or none"
        raise APIError(400, message, param="tags")
    registry: Registry = request.app.state.server.registry
    found = _find(request, model)
    if found.served is not None and not found.is_awake:
        await registry.loader.load(found)
    return json_response(Done())


@sleeping_router.get("/is_sleeping", responses=returns(Sleeping))
async def is_sleeping(request: Request, model: ModelName = None) -> Response:
    """Whether a model sleeps; wakes nothing."""
    return json_response(Sleeping(_find(request, model).state == "sleeping"))


adapters_router = APIRouter(route_class=JSONRoute, tags=["adapters"])
adapter_list_router = APIRouter(route_class=ListRoute, tags=["adapters"])

MAX_NAME = 256
CHANGES_ADAPTERS = "load and unload adapters, or say which are used"


class LoadLoRARequest(RequestModel):
    lora_name: Annotated[str, pydantic.Field(max_length=MAX_NAME)] = ""
    """What requests are to call the adapter."""
    lora_path: Annotated[str, pydantic.Field(max_length=MAX_PATH)] = ""
    """A folder that PEFT saved, or a GGUF adapter, on the server's machine; or a hub id."""
    base_model_name: str | None = None
    """The model that it is for; by default the first."""
    load_inplace: bool = False
    """Load it anew where there is one of this name, whose requests under way go on with the old one."""
    is_3d_lora_weight: Literal[False] = False
    """Only false: adapters of experts that are stored as one stack are not supported."""


class UnloadLoRARequest(RequestModel):
    lora_name: Annotated[str, pydantic.Field(max_length=MAX_NAME)] = ""
    """The adapter's name."""
    lora_int_id: int | None = None
    """vLLM's own number of it, which is not looked at: adapters go by their names."""


class AdapterShown(msgspec.Struct, kw_only=True):
    id: int
    """What the field `lora` of requests calls it."""
    name: str
    path: str
    scale: float
    """How strongly requests use it that choose no adapter; 0 is not at all."""


@adapters_router.post("/load_lora_adapter", response_class=PlainTextResponse, responses=returns())
async def load_lora_adapter(body: LoadLoRARequest, request: Request) -> Response:
    """Load an adapter, under whose name requests then find it; answers once the engine has used it."""
    check_admin(request, CHANGES_ADAPTERS)
    state: ServerState = request.app.state.server
    if not body.lora_name or not body.lora_path:
        missing = "lora_path" if body.lora_name else "lora_name"
        raise _wrong("Both 'lora_name' and 'lora_path' must be provided.", missing)
    model = _find(request, body.base_model_name)
    _check_enabled(model)
    parent = model.name if body.base_model_name is None else body.base_model_name
    call = await open_call(request, parent)
    async with model.adapters.changing:
        _check_name(state.registry, model, body)
        try:
            source = str(await state.offload(resolve_adapter, body.lora_path))
        except ModelNotFoundError as error:
            raise APIError(404, str(error), type="NotFoundError", param="lora_path", code="adapter_not_found") from None
        adapter = model.adapters.new(body.lora_name, body.lora_path, parent, source=source)
        try:
            await check_adapter(call.model.engine, adapter)
        except InvalidRequestError as error:
            raise APIError(400, str(error), param="lora_path", code="adapter_refused") from None
        model.adapters.keep(adapter)
    state.registry.changes.ring()
    logger.info("model %s: adapter %s was loaded from %s", model.name, adapter.name, adapter.path)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


@adapters_router.post("/unload_lora_adapter", response_class=PlainTextResponse, responses=returns())
async def unload_lora_adapter(body: UnloadLoRARequest, request: Request) -> Response:
    """Forget an adapter; requests that use it go on to their end."""
    check_admin(request, CHANGES_ADAPTERS)
    registry: Registry = request.app.state.server.registry
    if not body.lora_name:
        raise _wrong("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    model = next((model for model in registry if model.adapters.get(body.lora_name)), None)
    if model is None:
        message = f"The lora adapter '{body.lora_name}' cannot be found."
        raise APIError(404, message, type="NotFoundError", param="lora_name", code="adapter_not_found")
    async with model.adapters.changing:
        model.adapters.remove(body.lora_name)
    registry.changes.ring()
    logger.info("model %s: adapter %s was unloaded", model.name, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@adapters_router.get("/lora-adapters", responses=returns(list[AdapterShown]))
async def list_lora_adapters(request: Request, model: ModelName = None) -> Response:
    """A model's adapters, by the numbers that the field `lora` takes, as llama.cpp lists them; loads nothing."""
    adapters = _find(request, model).adapters
    listed = [
        AdapterShown(id=one.number, name=one.name, path=one.path, scale=adapters.default_scale(one)) for one in adapters
    ]
    return json_response(listed)


@adapter_list_router.post("/lora-adapters", responses=returns(Done))
async def set_lora_adapters(
    body: Annotated[list[AdapterScale], pydantic.Field(max_length=MAX_ADAPTERS)],
    request: Request,
    model: ModelName = None,
) -> Response:
    """Say which adapters requests use that choose none, and how strongly; those that are not listed are not used."""
    check_admin(request, CHANGES_ADAPTERS)
    found = _find(request, model)
    _check_enabled(found)
    with naming(lambda place: Field(*place.path[1:])):  # the body itself is the list
        found.adapters.set_default_scales(adapter_scales(body))
    return json_response(Done())


def _check_enabled(model: LoadableModel) -> None:
    if not model.config.enable_lora:
        message = f"model {model.name!r} takes no adapters; start the server with --enable-lora"
        raise APIError(400, message, code="adapters_disabled")


def _check_name(registry: Registry, model: LoadableModel, body: LoadLoRARequest) -> None:
    name = body.lora_name
    if model.adapters.get(name) is not None:
        if not body.load_inplace:
            told = "If you want to load the adapter in place, set 'load_inplace' to True."
            raise _wrong(f"The lora adapter '{name}' has already been loaded. {told}", "lora_name")
    elif not is_served_name(name):
        raise _wrong(f"lora_name is {shown(name)}; it must be {SERVED_NAME}", "lora_name")
    elif registry.named(name) is not None:
        raise _wrong(f"lora_name is {name!r}, which is the name of a model, or of another model's adapter", "lora_name")


def _wrong(message: str, param: str) -> APIError:
    return APIError(400, message, type="InvalidUserInput", param=param)
