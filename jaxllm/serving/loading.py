"""The server from its first moment: it says how far loading is, and hands over to the application once that is done."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxllm.config.server import ServerConfig
from jaxllm.progress import watched_by
from jaxllm.serving.app import add_guards, create_app, find_route, make_routes
from jaxllm.serving.http.answers import json_response
from jaxllm.serving.http.api_error import RETRY_AFTER_SECONDS, unavailable
from jaxllm.serving.http.errors import error_response
from jaxllm.serving.registry import Registry
from jaxllm.serving.state import ServerState
from jaxllm.serving.status import Alive, show_version
from jaxllm.serving.web.routes import make_router as make_web_router


class Loading(msgspec.Struct):
    """The body of /ready and /health until the models are loaded."""

    doing: str
    """What is going on, in words."""
    done: int = 0
    """Parts of it that are done."""
    total: int = 0
    """Its parts; 0 where they are not counted."""
    status: str = "loading"

    def __str__(self) -> str:
        return f"{self.doing} ({self.done} of {self.total})" if self.total else self.doing


class Entrance:
    """An ASGI application that answers at once, and with the server's routes as soon as `start` has returned.

    `start` makes the models in a thread. Until then probes are told how far it is, the page is served, and every other
    request gets 503 in the shape of its own API. What `start` raises is kept in `error`; `on_ready` is called when it
    has either returned or failed.
    """

    def __init__(self, config: ServerConfig, start: Callable[[], Registry], on_ready: Callable[[], None]):
        self.error: BaseException | None = None
        self.stage = Loading("Starting")
        self._config = config
        self._start = start
        self._on_ready = on_ready
        self._app: FastAPI | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """That the server runs on, once it does."""
        self._waiting_room = self._make_waiting_room()

    @property
    def app(self) -> FastAPI | None:
        """The server's routes, once there are models."""
        return self._app

    @property
    def state(self) -> ServerState | None:
        """What the routes share, once there are models."""
        return None if self._app is None else self._app.state.server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        here = self._waiting_room if self._app is None or scope["type"] == "lifespan" else self._app
        await here(scope, receive, send)

    def _make_waiting_room(self) -> Starlette:
        probes = {
            "/livez": self._live,
            "/ready": self._progress,
            "/readyz": self._progress,
            "/health": self._progress,
            "/ping": self._progress,
        }
        routes: list[Any] = [Route(path, answer) for path, answer in probes.items()]
        routes.append(Route("/version", self._version))
        if self._config.web:
            routes += make_web_router().routes
        room = Starlette(routes=routes, lifespan=self._lifespan)
        room.router.default = self._refuse
        add_guards(room, self._config)
        return room

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            loading = asyncio.create_task(self._load(stack))
            yield
            await loading

    async def _load(self, stack: AsyncExitStack) -> None:
        try:
            registry, routes = await asyncio.gather(
                asyncio.to_thread(self._make_models), asyncio.to_thread(make_routes, self._config)
            )
            app = create_app(self._config, registry, routes)
            await stack.enter_async_context(app.router.lifespan_context(app))
        except BaseException as error:  # whoever started the server raises it
            self.error = error
        else:
            gc.collect()
            gc.freeze()  # what is there now stays: looking through it each time would take a tenth of a second
            self._app = app
        self._on_ready()

    def _make_models(self) -> Registry:
        with watched_by(self._note):
            return self._start()

    def _note(self, doing: str, done: int, total: int) -> None:
        self.stage = Loading(doing, done, total)

    async def _live(self, _: Request) -> Response:
        return json_response(Alive())

    async def _version(self, _: Request) -> Response:
        return await show_version()

    async def _progress(self, _: Request) -> Response:
        body = msgspec.json.encode(self.stage)
        return Response(body, 503, {"Retry-After": RETRY_AFTER_SECONDS}, media_type="application/json")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = unavailable(f"the model is loading: {self.stage}; /ready answers 200 when it is done", code="loading")
        await getattr(find_route(scope), "error_response", error_response)(error)(scope, receive, send)
