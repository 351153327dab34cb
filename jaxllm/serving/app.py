"""The FastAPI application, assembled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request, Response, Security
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.serving import control, mcp, status
from jaxllm.serving.access import usage
from jaxllm.serving.access.usage import UsageStore
from jaxllm.serving.anthropic import routes as anthropic
from jaxllm.serving.batches import routes as batches
from jaxllm.serving.batches.run import Batches
from jaxllm.serving.dialects import llama_cpp, sagemaker
from jaxllm.serving.http.answers import install_error_handlers, install_openapi
from jaxllm.serving.http.middleware import ContentEncoding, OriginGuard, ProxyPrefix, RequestIds, SameRoute
from jaxllm.serving.http.route import ClientDisconnected
from jaxllm.serving.metrics import ServerCollector
from jaxllm.serving.ollama import routes as ollama
from jaxllm.serving.openai import chat, completions, models, tokenize
from jaxllm.serving.pooling import decisions
from jaxllm.serving.pooling import routes as pooling
from jaxllm.serving.pooling.inputs import score_method
from jaxllm.serving.request_log import AuditLog, Observer, Records, log_request
from jaxllm.serving.responses import routes as responses
from jaxllm.serving.responses.service import Responses
from jaxllm.serving.state import Registry, ServerState
from jaxllm.serving.store.database import Database, sqlite_url
from jaxllm.serving.stored import Retention, deleters
from jaxllm.serving.telemetry import Telemetry
from jaxllm.serving.web import make_plain_router, make_swagger_router
from jaxllm.serving.web import make_router as make_web_router

API_ROUTERS = (
    models.router, chat.router, completions.router, tokenize.router, responses.router, responses.conversations_router,
    anthropic.router, pooling.router, pooling.scoring_router, decisions.router, batches.upload_router,
    batches.files_router, batches.router, mcp.router, tokenize.template_router, status.info_router, sagemaker.router,
    control.sleeping_router, usage.router, control.adapters_router, control.adapter_list_router, control.router,
    llama_cpp.router,
)  # fmt: skip
OWN_PATHS = (pooling.rerank_v2_router, pooling.embed_v2_router, ollama.router)
"""Routers whose paths are whole; those of the others are under /v1 as well."""


def make_routes(config: ServerConfig) -> FastAPI:
    """An application with the server's routes, which `create_app` gives models; it takes a third of a second."""
    app = FastAPI(
        title="jaxllm",
        version=version("jaxllm"),
        redirect_slashes=False,
        openapi_url=None,  # install_openapi adds it, and there are no pages of FastAPI's then
    )
    install_openapi(app)
    shown_key = [Security(HTTPBearer(auto_error=False))] if config.asks_for_key else []
    app.include_router(llama_cpp.native_router, dependencies=shown_key)  # before /completions without /v1 in front
    for router in API_ROUTERS:
        app.include_router(router, prefix="/v1", dependencies=shown_key)
        app.include_router(router, include_in_schema=False)
    for router in OWN_PATHS:
        app.include_router(router, dependencies=shown_key)
    app.include_router(status.router)
    app.include_router(make_swagger_router())
    app.include_router(make_web_router() if config.web else make_plain_router())
    install_error_handlers(app)
    for gone in (ClientDisconnected, ClientDisconnect):  # before the answer, and before the body was complete
        app.add_exception_handler(gone, _nobody_listens)
    # FastAPI reads the parameters of routes at the first look for one: do that now, so that no request waits.
    nowhere = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": [], "app": app}
    for route in app.routes:
        route.matches(nowhere)
    return app


def create_app(config: ServerConfig, registry: Registry, routes: FastAPI | None = None) -> FastAPI:
    """The server's routes over running engines, which the caller shuts down. Raises ConfigError for bad settings."""
    for model in registry.loaded:
        score_method(model.config, model.engine.info.tasks)
    state = ServerState(config, registry)
    telemetry = Telemetry(config) if config.sends_telemetry else None
    database = Database(config.database_url or sqlite_url(config.data_dir))
    retention = Retention(database, deleters(database, config.data_dir), config.store_retention)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if database.exists:
            await database.open()  # whatever keeps it from being used ends the server now
        retention.start()
        await state.limits.check()
        app.state.usage.start()
        await app.state.batches.resume()
        await state.tool_servers.start()
        registry.loader.start()
        yield
        await app.state.batches.close()
        await app.state.responses.background.close()
        await app.state.usage.close()
        await retention.close()
        await database.close()
        await state.close()
        await registry.loader.close()
        await registry.check_released()
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)

    app = make_routes(config) if routes is None else routes
    app.router.lifespan_context = lifespan
    app.state.server = state
    app.state.responses = Responses(state, database)
    app.state.batches = Batches(app, state, database)
    state.media.located = app.state.batches.files.located
    app.state.metrics = ServerCollector(registry, vllm_names=config.vllm_metrics)
    app.state.usage = UsageStore(state.usage, database, keeps=config.api_key_file is not None)
    add_guards(app, config, () if telemetry is None else [telemetry], state.audit)
    return app


def find_route(scope: Scope) -> BaseRoute | None:
    """The route of the API that answers a request, whatever prefix it has."""
    path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/v1")
    asked = {**scope, "path": path, "root_path": ""}
    routers = (llama_cpp.native_router, *API_ROUTERS, *OWN_PATHS)
    routes = (route for router in routers for route in router.routes)
    return next((route for route in routes if route.matches(asked)[0] is not Match.NONE), None)


def add_guards(
    app: Starlette, config: ServerConfig, observers: Sequence[Observer] = (), audit: AuditLog | None = None
) -> None:
    """Add the layers that every request passes before its route, the last one first."""
    app.add_middleware(ContentEncoding)
    app.add_middleware(SameRoute)
    origins = comma_separated(config.allowed_origins)
    app.add_middleware(
        OriginGuard,
        allowed_origins=origins,
        allowed_hosts=comma_separated(config.allowed_hosts) or (["*"] if config.uds is not None else []),
        has_key=config.asks_for_key,
    )
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(ProxyPrefix, root_path=config.root_path)
    app.add_middleware(RequestIds)
    shown = [*observers, *([log_request] if config.logs_requests else [])]
    if shown or audit is not None:
        app.add_middleware(Records, observers=shown, keeps_texts=config.log_prompts, audit=audit)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
