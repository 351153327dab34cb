"""The monitor port: its answers, and its own event loop on a thread, which answers while the server's is busy."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio.to_thread
import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.engine.messages import LookAt
from jaxllm.looking import What, look, stacks
from jaxllm.serving import status
from jaxllm.serving.http.answers import json_response
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.errors import HANDLED, error_response, to_api_error
from jaxllm.serving.http.listening import address, bind
from jaxllm.serving.http.middleware import LOCAL_NAMES, OriginGuard
from jaxllm.wording import did_you_mean, shown

API = "api"
"""The process that answers HTTP. Those of engines are engine/MODEL, or engine/MODEL/NUMBER of several."""
MOST_SECONDS = 300.0
PROFILE_SECONDS, TRACE_SECONDS = 30.0, 3.0
"""Unless a request says how long."""

Answering = Callable[[Request], Awaitable[Response]]
_PROBES: dict[str, Answering] = {
    "/health": status.health,
    "/ping": status.ping,
    "/ready": status.ready,
    "/readyz": status.ready,
    "/load": status.load,
    "/metrics": status.metrics,
}

logger = logging.getLogger(__name__)
END_SECONDS = 3.0
"""How long the end waits for what is being answered."""


class Overview(msgspec.Struct):
    """What can be asked for, and of which processes."""

    processes: list[str]
    routes: list[str]


class Monitor:
    """The routes, over a server that may still be loading its models.

    Args:
        find_app: the server's application, None until it is there.
        find_loop: the event loop that the server runs on, None before it does.
    """

    def __init__(
        self,
        find_app: Callable[[], FastAPI | None],
        find_loop: Callable[[], asyncio.AbstractEventLoop | None],
    ):
        self._find_app = find_app
        self._find_loop = find_loop
        looks: dict[str, Answering] = {
            "/debug/": self.overview,
            "/debug/pprof/profile": self.profile,
            "/debug/pprof/heap": self.heap,
            "/debug/stacks": self.stacks,
            "/debug/trace": self.trace,
        }
        self._paths = list(looks)
        plain: dict[str, Answering] = {"/livez": _live, "/version": _version} | looks
        routes = [Route(path, answer) for path, answer in plain.items()]
        routes += [Route(path, partial(self._probe, answer)) for path, answer in _PROBES.items()]
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(HANDLED, refuse))

    @property
    def processes(self) -> dict[str, LookAt]:
        """How to look at each process that runs now, by its name."""
        found: dict[str, LookAt] = {API: self._look_here}
        app = self._find_app()
        for model in () if app is None else app.state.server.registry.loaded:
            for number, look_at in model.engine.processes.items():
                name = f"engine/{model.names[0]}"
                found[f"{name}/{number}" if number else name] = look_at
        return found

    async def overview(self, request: Request) -> Response:
        """The processes by their names, and the routes of /debug/."""
        _check_names(request, ())
        return json_response(Overview(list(self.processes), self._paths))

    async def profile(self, request: Request) -> Response:
        """Where the threads of a process spend `seconds`, in pprof's format."""
        _check_names(request, ("process", "seconds"))
        data = await self._look(request, "profile", _seconds(request, PROFILE_SECONDS))
        return _file(data, "profile.pb.gz")

    async def heap(self, request: Request) -> Response:
        """What holds memory: `of` the devices, or `of` Python; by default what the process is about."""
        _check_names(request, ("process", "of"))
        of = request.query_params.get("of", "python" if self._name(request) == API else "device")
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
        name, processes = self._name(request), self.processes
        look_at = processes.get(name)
        if look_at is None:
            near = did_you_mean(name, processes) or f"; there are {', '.join(processes)}"
            raise APIError(404, f"process is {shown(name)}, which does not run{near}", param="process")
        return await anyio.to_thread.run_sync(look_at, what, seconds, abandon_on_cancel=True)

    def _look_here(self, what: What, seconds: float) -> bytes:
        return stacks(self._find_loop()).encode() if what == "stacks" else look(what, seconds)

    @staticmethod
    def _name(request: Request) -> str:
        return request.query_params.get("process", API)

    async def _probe(self, answer: Answering, request: Request) -> Response:
        app = self._find_app()
        if app is None:
            raise unavailable("the model is loading", code="loading")
        return await answer(Request({**request.scope, "app": app}, request.receive))


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error))


@contextmanager
def monitoring(
    config: ServerConfig,
    find_app: Callable[[], FastAPI | None],
    find_loop: Callable[[], asyncio.AbstractEventLoop | None],
) -> Iterator[str | None]:
    """The monitor port is open inside, if the settings name one; yields its address. For the functions see Monitor.

    Raises ConfigError where it cannot be had.
    """
    if config.monitor_port is None:
        yield None
        return
    app = Monitor(find_app, find_loop).app
    hosts = comma_separated(config.allowed_hosts) or ([] if is_local(config.monitor_host) else ["*"])
    app.add_middleware(OriginGuard, allowed_origins=[], allowed_hosts=hosts, has_key=False)
    with bind(config.monitor_host, config.monitor_port, "monitor_") as listener:
        settings = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="monitor", daemon=True)
        thread.start()
        where = address(listener)
        logger.info("monitoring on %s/debug/", where)
        try:
            yield where
        finally:
            server.should_exit = True
            thread.join(END_SECONDS)


def is_local(host: str) -> bool:
    """Whether only this machine can reach it, by whose names alone it is then called."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_NAMES


async def _live(_: Request) -> Response:
    return await status.livez()


async def _version(_: Request) -> Response:
    return await status.show_version()


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
