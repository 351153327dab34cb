"""/server_info"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxllm.serving.access.tenant import tenant_of
from jaxllm.serving.fingerprint import engine_settings
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["status"])


class EngineShown(msgspec.Struct, kw_only=True):
    """What the engine settled on at its start; null until the default model was loaded for the first time."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    num_pages: int | None
    page_size: int | None
    vocab_size: int | None
    hidden_size: int | None


class ServerInfo(msgspec.Struct, kw_only=True):
    version: str
    system_fingerprint: str | None
    """Null where the default model is not loaded."""
    models: list[str]
    settings: dict[str, Any]
    """Those of the engine that may change an answer; neither keys nor places of the machine."""
    engine: EngineShown


@router.get("/server_info", responses=returns(ServerInfo))
async def server_info(request: Request) -> Response:
    """The version, the engine's settings and what it made of them."""
    state: ServerState = request.app.state.server
    tenant = tenant_of(request)
    model = state.registry.find(None, tenant)
    info = model.info
    shown = ServerInfo(
        version=version("jaxllm"),
        system_fingerprint=None if model.served is None else model.served.system_fingerprint,
        models=state.registry.names_for(tenant),
        settings=engine_settings(model.config),
        engine=EngineShown(**{name: getattr(info, name, None) for name in EngineShown.__struct_fields__}),
    )
    return json_response(shown)
