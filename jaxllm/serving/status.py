"""A server's own state: for probes and dashboards, at /server_info, and on a port of its own for monitoring."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import anyio.to_thread
import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.routing import Route

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.engine.messages import LookAt
from jaxllm.looking import What, look, stacks
from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.access.usage import usage_by_key
from jaxllm.serving.http.answers import HANDLED, error_response, json_response, returns, to_api_error
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.connections import serve_on_thread
from jaxllm.serving.http.listening import address, bind
from jaxllm.serving.http.middleware import LOCAL_NAMES, OriginGuard
from jaxllm.serving.http.route import JSONRoute, bearer_key
from jaxllm.serving.served_model import engine_settings
from jaxllm.serving.state import ServerState
from jaxllm.wording import did_you_mean, shown

logger = logging.getLogger(__name__)

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
async def livez(_: Request) -> Response:
    """200 as long as the server runs, also while models load and while an engine starts again."""
    return json_response(Alive())


@router.get("/health", responses=returns(Health))
@router.get("/v1/health", responses=returns(Health), include_in_schema=False)
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
async def show_version(_: Request) -> Response:
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
        shown += usage_by_key(state.usage, reader) if state.config.api_key_file is not None else b""
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


API = "api"
"""The process that answers HTTP. Those of engines are engine/MODEL, or engine/MODEL/NUMBER of several."""
MOST_SECONDS = 300.0
PROFILE_SECONDS, TRACE_SECONDS = 30.0, 3.0  # by default
END_SECONDS = 3.0  # the longest that the end waits for answers under way

FindApp = Callable[[], FastAPI | None]
FindLoop = Callable[[], asyncio.AbstractEventLoop | None]
Answering = Callable[[Request], Awaitable[Response]]
_PROBES: dict[str, Answering] = {
    "/health": health, "/ping": ping, "/ready": ready, "/readyz": ready, "/load": load, "/metrics": metrics,
}  # fmt: skip


class Overview(msgspec.Struct):
    processes: list[str]
    routes: list[str]


class Monitor:
    """The routes, over a server that may still be loading its models: until then there is no application, or loop."""

    def __init__(self, find_app: FindApp, find_loop: FindLoop):
        self._find_app = find_app
        self._find_loop = find_loop
        self._looks: dict[str, Answering] = {
            "/debug/": self.overview,
            "/debug/pprof/profile": self.profile,
            "/debug/pprof/heap": self.heap,
            "/debug/stacks": self.stacks,
            "/debug/trace": self.trace,
        }
        plain: dict[str, Answering] = {"/livez": livez, "/version": show_version} | self._looks
        routes = [Route(path, answer) for path, answer in plain.items()]
        routes += [Route(path, partial(self._probe, answer)) for path, answer in _PROBES.items()]
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(HANDLED, _refuse))

    @property
    def processes(self) -> dict[str, LookAt]:
        found: dict[str, LookAt] = {API: self._look_here}
        app = self._find_app()
        for model in () if app is None else app.state.server.registry.loaded:
            for number, look_at in model.engine.processes.items():
                name = f"engine/{model.names[0]}"
                found[f"{name}/{number}" if number else name] = look_at
        return found

    async def overview(self, request: Request) -> Response:
        _check_names(request, ())
        return json_response(Overview(list(self.processes), list(self._looks)))

    async def profile(self, request: Request) -> Response:
        """Where the threads of a process spend `seconds`, in pprof's format."""
        _check_names(request, ("process", "seconds"))
        data = await self._look(request, "profile", _seconds(request, PROFILE_SECONDS))
        return _file(data, "profile.pb.gz")

    async def heap(self, request: Request) -> Response:
        """What holds memory: `of` the devices, or `of` Python; by default what the process is about."""
        _check_names(request, ("process", "of"))
        is_api = request.query_params.get("process", API) == API
        of = request.query_params.get("of", "python" if is_api else "device")
        if of not in ("python", "device"):
            raise APIError(400, f"of is {shown(of)}; it must be python or device", param="of")
        return _file(await self._look(request, "python_heap" if of == "python" else "device_heap"), "heap.pb.gz")

    async def stacks(self, request: Request) -> Response:
        """What every thread of a process does at this moment, as text."""
        _check_names(request, ("process",))
        return Response(await self._look(request, "stacks"), media_type="text/plain")

    async def trace(self, request: Request) -> Response:
        """What an engine's host and devices do over `seconds`: a zip for Perfetto and XProf, by JAX's profiler."""
        _check_names(request, ("process", "seconds"))
        data = await self._look(request, "trace", _seconds(request, TRACE_SECONDS))
        return _file(data, "trace.zip", "application/zip")

    async def _look(self, request: Request, what: What, seconds: float = 0.0) -> bytes:
        name, processes = request.query_params.get("process", API), self.processes
        look_at = processes.get(name)
        if look_at is None:
            near = did_you_mean(name, processes) or f"; there are {', '.join(processes)}"
            raise APIError(404, f"process is {shown(name)}, which does not run{near}", param="process")
        return await anyio.to_thread.run_sync(look_at, what, seconds, abandon_on_cancel=True)

    def _look_here(self, what: What, seconds: float) -> bytes:
        return stacks(self._find_loop()).encode() if what == "stacks" else look(what, seconds)

    async def _probe(self, answer: Answering, request: Request) -> Response:
        app = self._find_app()
        if app is None:
            raise unavailable("the model is loading", code="loading")
        return await answer(Request({**request.scope, "app": app}, request.receive))


async def _refuse(_: Request, error: Exception) -> Response:
    return error_response(to_api_error(error))


@contextmanager
def monitoring(config: ServerConfig, find_app: FindApp, find_loop: FindLoop) -> Iterator[str | None]:
    """The monitor port is open inside, if the settings name one; yields its address. Raises ConfigError."""
    if config.monitor_port is None:
        yield None
        return
    app = Monitor(find_app, find_loop).app
    hosts = comma_separated(config.allowed_hosts) or ([] if is_local(config.monitor_host) else ["*"])
    app.add_middleware(OriginGuard, allowed_origins=[], allowed_hosts=hosts, has_key=False)
    with bind(config.monitor_host, config.monitor_port, "monitor_") as listener:
        server, thread = serve_on_thread(app, listener, "monitor")
        where = address(listener)
        logger.info("monitoring on %s/debug/", where)
        try:
            yield where
        finally:
            server.should_exit = True
            thread.join(END_SECONDS)


def is_local(host: str) -> bool:
    """True if only this machine can reach it, by whose names alone it is then called."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_NAMES


def _check_names(request: Request, known: tuple[str, ...]) -> None:
    for name in request.query_params:
        if name not in known:
            takes = ", ".join(known) or "no parameters"
            raise APIError(400, f"unknown parameter {shown(name)}; {request.url.path} takes {takes}", param=name)


def _seconds(request: Request, default: float) -> float:
    text = request.query_params.get("seconds")
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        message = f"seconds is {shown(text)}; it must be a number above 0, {MOST_SECONDS:g} at most"
        raise APIError(400, message, param="seconds")
    return seconds


def _file(data: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    return Response(data, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})
