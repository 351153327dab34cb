"""Routes that load, unload and weigh LoRA adapters, as vLLM and llama.cpp have them."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec
import pydantic
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from jaxllm.chat.conversation import naming
from jaxllm.config.values import SERVED_NAME, is_served_name
from jaxllm.errors import Field, InvalidRequestError, ModelNotFoundError
from jaxllm.serving.access.keys import check_admin, tenant_of
from jaxllm.serving.adapters import check_adapter
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import JSONRoute, ListRoute
from jaxllm.serving.loadable import LoadableModel
from jaxllm.serving.openai.sampling import MAX_ADAPTERS, AdapterScale, adapter_scales
from jaxllm.serving.registry import ModelName, Registry
from jaxllm.serving.state import ServerState
from jaxllm.weights.source import resolve_adapter
from jaxllm.wording import shown

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JSONRoute, tags=["adapters"])
list_router = APIRouter(route_class=ListRoute, tags=["adapters"])

MAX_NAME = 256
MAX_PATH = 4096
CHANGES = "load and unload adapters, or say which are used"


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


class ScalesSet(msgspec.Struct):
    success: bool = True


@router.post("/load_lora_adapter", response_class=PlainTextResponse, responses=returns())
async def load_lora_adapter(body: LoadLoRARequest, request: Request) -> Response:
    """Load an adapter, under whose name requests then find it; answers once the engine has used it."""
    check_admin(request, CHANGES)
    state: ServerState = request.app.state.server
    registry: Registry = state.registry
    if not body.lora_name or not body.lora_path:
        raise _wrong(
            "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if body.lora_name else "lora_name"
        )
    model = registry.find(body.base_model_name, tenant_of(request))
    _check_enabled(model)
    call = await open_call(request, model.name if body.base_model_name is None else body.base_model_name)
    async with model.adapters.changing:
        _check_name(registry, model, body)
        source = await _resolved(state, body.lora_path)
        parent = model.name if body.base_model_name is None else body.base_model_name
        adapter = model.adapters.new(body.lora_name, body.lora_path, parent, source=source)
        try:
            await check_adapter(call.model.engine, adapter)
        except InvalidRequestError as error:
            raise APIError(400, str(error), param="lora_path", code="adapter_refused") from None
        model.adapters.keep(adapter)
    registry.changes.ring()
    logger.info("model %s: adapter %s was loaded from %s", model.name, adapter.name, adapter.path)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


@router.post("/unload_lora_adapter", response_class=PlainTextResponse, responses=returns())
async def unload_lora_adapter(body: UnloadLoRARequest, request: Request) -> Response:
    """Forget an adapter; requests that use it go on to their end."""
    check_admin(request, CHANGES)
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


@router.get("/lora-adapters", responses=returns(list[AdapterShown]))
async def list_lora_adapters(request: Request, model: ModelName = None) -> Response:
    """A model's adapters, by the numbers that the field `lora` takes, as llama.cpp lists them; loads nothing."""
    adapters = request.app.state.server.registry.find(model, tenant_of(request)).adapters
    listed = [
        AdapterShown(id=one.number, name=one.name, path=one.path, scale=adapters.default_scale(one)) for one in adapters
    ]
    return json_response(listed)


@list_router.post("/lora-adapters", responses=returns(ScalesSet))
async def set_lora_adapters(
    body: Annotated[list[AdapterScale], pydantic.Field(max_length=MAX_ADAPTERS)],
    request: Request,
    model: ModelName = None,
) -> Response:
    """Say which adapters requests use that choose none, and how strongly; those that are not listed are not used."""
    check_admin(request, CHANGES)
    found: LoadableModel = request.app.state.server.registry.find(model, tenant_of(request))
    _check_enabled(found)
    with naming(lambda place: Field(*place.path[1:])):  # the body itself is the list
        found.adapters.set_default_scales(adapter_scales(body))
    return json_response(ScalesSet())


def _check_enabled(model: LoadableModel) -> None:
    if not model.config.enable_lora:
        message = f"model {model.name!r} takes no adapters; start the server with --enable-lora"
        raise APIError(400, message, code="adapters_disabled")


def _check_name(registry: Registry, model: LoadableModel, body: LoadLoRARequest) -> None:
    """Raises APIError 400 where the adapter's name is taken, by another one or by a model."""
    name = body.lora_name
    if model.adapters.get(name) is not None:
        if not body.load_inplace:
            raise _wrong(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "lora_name",
            )
    elif not is_served_name(name):
        raise _wrong(f"lora_name is {shown(name)}; it must be {SERVED_NAME}", "lora_name")
    elif registry.has_name(name):
        raise _wrong(f"lora_name is {name!r}, which is the name of a model, or of another model's adapter", "lora_name")


async def _resolved(state: ServerState, path: str) -> str:
    """Where the adapter is on this machine, fetched from the hub if need be."""
    try:
        return str(await state.offload(resolve_adapter, path))
    except ModelNotFoundError as error:
        raise APIError(404, str(error), type="NotFoundError", param="lora_path", code="adapter_not_found") from None


def _wrong(message: str, param: str) -> APIError:
    return APIError(400, message, type="InvalidUserInput", param=param)
