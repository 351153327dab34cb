"""/models"""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["models"])


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    parent: None = None
    max_model_len: int
    has_chat_template: bool
    """Without one it only continues text, and answers no chats."""
    num_parameters: int
    """As published."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/models", responses=returns(ModelList))
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    state: ServerState = request.app.state.server
    return json_response(ModelList(data=[_model(state, name) for name in state.registry.names]))


@router.get("/models/{model:path}", responses=returns(Model))
async def retrieve_model(model: str, request: Request) -> Response:
    """One of those names; a name may contain slashes."""
    state: ServerState = request.app.state.server
    return json_response(_model(state, model))


def _model(state: ServerState, name: str) -> Model:
    model = state.registry.find(name)
    info = model.engine.info
    return Model(
        id=name,
        created=state.created,
        root=model.config.model,
        max_model_len=info.max_model_len,
        has_chat_template=model.has_chat_template,
        num_parameters=info.num_parameters,
    )
