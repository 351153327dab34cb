"""What a server says of itself, for probes and dashboards without a key, and /server_info with one."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.access.usage import usage_by_key
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.http.route import JSONRoute, bearer_key
from jaxllm.serving.served_model import engine_settings
from jaxllm.serving.state import ServerState

router = APIRouter(tags=["status"])

info_router = APIRouter(route_class=JSONRoute, tags=["status"])


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok", "degraded"]
    """Degraded while some models answer and others have stopped."""
    stopped_models: list[str] | UnsetType = UNSET
    """Those, where there are any."""
    step_ages: dict[str, float] | UnsetType = UNSET
    """Model -> seconds since its engine's last step, of those that have requests to run."""


class Alive(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct):
    status: Literal["ready"] = "ready"


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    """Requests now generating or waiting to."""


@router.get("/livez", responses=returns(Alive))
async def livez() -> Response:
    """200 as long as the server runs, also while models load and while an engine starts again."""
    return json_response(Alive())


@router.get("/health", responses=returns(Health))
async def health(request: Request) -> Response:
    """200 while any model can answer or be loaded, 503 while the server starts and when all engines have stopped."""
    state: ServerState = request.app.state.server
    state.registry.check_alive()
    stopped = [model.name for model in state.registry.dead()]
    ages = {
        model.names[0]: round(age, 3) for model in state.registry.loaded if (age := model.engine.step_age) is not None
    }
    shown = Health(status="degraded" if stopped else "ok", stopped_models=stopped or UNSET, step_ages=ages or UNSET)
    return json_response(shown)


@router.get("/ping", responses=returns(Health))
@router.post("/ping", responses=returns(Health))
async def ping(request: Request) -> Response:
    """/health, under the name that SageMaker asks for."""
    return await health(request)


@router.get("/ready", responses=returns(Ready))
@router.get("/readyz", responses=returns(Ready))
async def ready(request: Request) -> Response:
    """200 when requests to the models loaded at the start wait for no compile, 503 while starting or shutting down."""
    state: ServerState = request.app.state.server
    state.check_accepting()
    if state.leaving:
        raise unavailable("the server is about to stop", code="shutting_down")
    if not state.is_ready:
        raise unavailable("the engine is still compiling", code="starting")
    return json_response(Ready())


@router.get("/version", responses=returns(Version))
async def show_version() -> Response:
    """The version of jaxllm."""
    return json_response(Version(version("jaxllm")))


@router.get("/load", responses=returns(Load))
async def load(request: Request) -> Response:
    """Requests that are generating now or waiting to."""
    state: ServerState = request.app.state.server
    return json_response(Load(len(state.running)))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics. What keys have used, whose names are nobody else's business, is shown to keys alone."""
    state: ServerState = request.app.state.server
    shown = generate_latest(request.app.state.metrics)
    if sent := bearer_key(request):
        reader = state.keys.check(sent)
        shown += usage_by_key(state.usage, reader) if state.keys.have_names else b""
    return Response(shown, headers={"Content-Type": CONTENT_TYPE_LATEST})


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


@info_router.get("/server_info", responses=returns(ServerInfo))
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
