"""/models"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.openai.model_types import Model, ModelList
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["models"])


@router.get("/models", responses=returns(ModelList))
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    state: ServerState = request.app.state.server
    return json_response(ModelList(data=[_model(state, name) for name in state.model_names]))


@router.get("/models/{model:path}", responses=returns(Model))
async def retrieve_model(model: str, request: Request) -> Response:
    """One of those names; a name may contain slashes."""
    state: ServerState = request.app.state.server
    return json_response(_model(state, state.resolve_model(model)))


def _model(state: ServerState, name: str) -> Model:
    return Model(id=name, created=state.created, root=state.config.model, max_model_len=state.engine.info.max_model_len)
