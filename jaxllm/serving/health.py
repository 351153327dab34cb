"""/health, /ping, /ready, /version, /load and /metrics: for probes and dashboards, without a key."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from jaxllm.errors import EngineDeadError
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.state import ServerState

router = APIRouter(tags=["status"])


class ProbeStatus(msgspec.Struct):
    status: Literal["ok", "ready"]


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    """Requests now generating or waiting to."""


@router.get("/health", responses=returns(ProbeStatus))
async def health(request: Request) -> Response:
    """200 while the engine is alive, 503 when it has stopped."""
    state: ServerState = request.app.state.server
    if state.is_dead:
        raise EngineDeadError("the engine has stopped")
    return json_response(ProbeStatus("ok"))


@router.get("/ping", responses=returns(ProbeStatus))
@router.post("/ping", responses=returns(ProbeStatus))
async def ping(request: Request) -> Response:
    """/health, under the name that SageMaker asks for."""
    return await health(request)


@router.get("/ready", responses=returns(ProbeStatus))
async def ready(request: Request) -> Response:
    """200 when requests run without waiting for a compile, 503 while starting or shutting down."""
    state: ServerState = request.app.state.server
    state.check_accepting()
    if not all(model.engine.stats().ready for model in state.models.values()):
        raise unavailable("the engine is still compiling", code="starting")
    return json_response(ProbeStatus("ready"))


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
    """Prometheus metrics."""
    return Response(generate_latest(request.app.state.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
