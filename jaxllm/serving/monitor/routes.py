"""What the monitor port answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial

import anyio.to_thread
import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.engine.messages import LookAt
from jaxllm.looking import What
from jaxllm.looking.look import look, stacks
from jaxllm.serving import health
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.errors import HANDLED, error_response, to_api_error
from jaxllm.serving.http.json_response import json_response
from jaxllm.wording import did_you_mean, shown

API = "api"
"""The process that answers HTTP. Those of engines are engine/MODEL, or engine/MODEL/NUMBER of several."""
MOST_SECONDS = 300.0
PROFILE_SECONDS, TRACE_SECONDS = 30.0, 3.0
"""Unless a request says how long."""

Answering = Callable[[Request], Awaitable[Response]]
_PROBES: dict[str, Answering] = {
    "/health": health.health,
    "/ping": health.ping,
    "/ready": health.ready,
    "/readyz": health.ready,
    "/load": health.load,
    "/metrics": health.metrics,
}


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


async def _live(_: Request) -> Response:
    return await health.livez()


async def _version(_: Request) -> Response:
    return await health.show_version()


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error))


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
