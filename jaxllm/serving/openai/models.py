"""/models: what a server has, how far each model is, and llama.cpp's routes that load and unload one."""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from jaxllm.serving.access.keys import Tenant, check_admin, tenant_of
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.http.route import EventStream, JSONRoute
from jaxllm.serving.mcp import injects_tools
from jaxllm.serving.served_model import LoadableModel, ModelState
from jaxllm.serving.state import ModelEvent, ServerState, model_events

router = APIRouter(route_class=JSONRoute, tags=["models"])


class ModelStatus(msgspec.Struct, kw_only=True):
    """The state of a model; one that is not loaded is loaded by the first request for it."""

    value: ModelState
    doing: str | UnsetType = UNSET
    """The work that goes on while it loads, in words."""
    done: int | UnsetType = UNSET
    """Parts of that which are done."""
    total: int | UnsetType = UNSET
    """Its parts; 0 where they are not counted."""
    error: str | UnsetType = UNSET
    """Why it could not be loaded; the next request tries again."""


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    """The model as the server was told of it; of an adapter its folder or file."""
    parent: str | None = None
    """Of an adapter, the model that it belongs to."""
    status: ModelStatus
    max_model_len: int | None
    """Null, as the two below, until the model was loaded for the first time."""
    has_chat_template: bool | None
    """Without one it only continues text, and answers no chats."""
    num_parameters: int | None
    """As published."""
    mcp_inject: bool
    """Whether the MCP servers' tools are offered to requests that bring no tools (the setting mcp_inject)."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ModelRequest(RequestModel):
    model: str
    """A name that /v1/models lists."""


class Accepted(msgspec.Struct):
    success: bool = True


@router.get("/models", responses=returns(ModelList))
async def list_models(request: Request) -> Response:
    """The names this server answers to, and how far each model is; loads nothing."""
    state: ServerState = request.app.state.server
    tenant = tenant_of(request)
    return json_response(ModelList(data=[_model(state, name, tenant) for name in state.registry.names_for(tenant)]))


@router.get("/models/sse", response_class=Response, responses=returns(events=(ModelEvent,)))
async def follow_models(request: Request) -> Response:
    """The state of every model, and from then on each change, as events of llama.cpp's router; loads nothing."""
    state: ServerState = request.app.state.server
    return EventStream(uuid.uuid4().hex, model_events(state.registry, tenant_of(request), state.config.sse_keep_alive))


@router.get("/models/{model:path}", responses=returns(Model))
async def retrieve_model(model: str, request: Request) -> Response:
    """One of those names; a name may contain slashes."""
    state: ServerState = request.app.state.server
    return json_response(_model(state, model, tenant_of(request)))


@router.post("/models/load", responses=returns(Accepted))
async def load_model(body: ModelRequest, request: Request) -> Response:
    """Begin to load a model, as llama.cpp's router does; GET /models says how far it is."""
    registry = request.app.state.server.registry
    model: LoadableModel = registry.find(body.model, tenant_of(request))
    if not model.is_awake:
        registry.loader.begin(model)
    return json_response(Accepted())


@router.post("/models/unload", responses=returns(Accepted))
async def unload_model(body: ModelRequest, request: Request) -> Response:
    """Unload a model, and answer when its memory is free; 409 while a request holds it, or it is pinned."""
    check_admin(request)
    registry = request.app.state.server.registry
    await registry.loader.unload(registry.find(body.model, tenant_of(request)))
    return json_response(Accepted())


def _model(state: ServerState, name: str, tenant: Tenant) -> Model:
    model = state.registry.find(name, tenant)
    info, adapter = model.info, model.adapters.get(name)
    return Model(
        id=name,
        created=state.created,
        root=model.config.model if adapter is None else adapter.path,
        parent=None if adapter is None else adapter.parent,
        status=_status(model),
        max_model_len=None if info is None else info.max_model_len,
        has_chat_template=model.has_chat_template,
        num_parameters=None if info is None else info.num_parameters,
        mcp_inject=injects_tools(state, model.config),
    )


def _status(model: LoadableModel) -> ModelStatus:
    status = ModelStatus(value=model.state)
    if model.state == "loading" and model.stage is not None:
        stage = model.stage
        status.doing, status.done, status.total = stage.doing, stage.done, stage.total
    elif model.state == "failed" and model.error is not None:
        status.error = model.error
    return status
