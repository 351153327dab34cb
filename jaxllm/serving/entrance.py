"""The HTTP server from its first moment to its last: it says how far loading is, answers, drains and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from jaxllm import logs, own_process
from jaxllm.config.server import ServerConfig
from jaxllm.progress import watched_by
from jaxllm.serving.app import add_guards, create_app, find_route, make_routes
from jaxllm.serving.http.answers import error_response
from jaxllm.serving.http.api_error import RETRY_AFTER_SECONDS, unavailable
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.listening import address, make_context, reload_certificate, scheme
from jaxllm.serving.running import Watchdog, notify
from jaxllm.serving.served_model import Stage, stopped
from jaxllm.serving.state import Registry, ServerState
from jaxllm.serving.status import livez, show_version
from jaxllm.serving.web import make_router as make_web_router

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3  # for cancelled requests to send their last chunk to a client that reads slowly
END_SECONDS = 30  # after config.shutdown_timeout until the process ends, whatever it waits for
IDLE_CONNECTION_SECONDS = 30


class Entrance:
    """An ASGI application that answers at once, and with the server's routes as soon as `start` has returned.

    `start` makes the models in a thread. Until then probes are told how far it is, the page is served, and every other
    request gets 503 in the shape of its own API. `on_ready` is called when `start` has returned, or has raised `error`.
    """

    def __init__(self, config: ServerConfig, start: Callable[[], Registry], on_ready: Callable[[], None]):
        self.error: BaseException | None = None
        self.stage = Stage("Starting")
        self._config = config
        self._start = start
        self._on_ready = on_ready
        self.app: FastAPI | None = None
        self.state: ServerState | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._waiting_room = self._make_waiting_room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        here = self._waiting_room if self.app is None or scope["type"] == "lifespan" else self.app
        await here(scope, receive, send)

    def _make_waiting_room(self) -> Starlette:
        routes: list[BaseRoute] = [Route("/livez", livez), Route("/version", show_version)]
        routes += [Route(path, self._progress) for path in ("/ready", "/readyz", "/health", "/ping")]
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
            self.app, self.state = app, app.state.server
        self._on_ready()

    def _make_models(self) -> Registry:
        def note(doing: str, done: int, total: int) -> None:
            self.stage = Stage(doing, done, total)

        with watched_by(note):
            return self._start()

    async def _progress(self, _: Request) -> Response:
        body = msgspec.json.encode(self.stage)
        return Response(body, 503, {"Retry-After": RETRY_AFTER_SECONDS}, media_type="application/json")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = unavailable(f"the model is loading: {self.stage}; /ready answers 200 when it is done", code="loading")
        await getattr(find_route(scope), "error_response", error_response)(error)(scope, receive, send)


def exit_now(status: int) -> NoReturn:
    """End at once, with the engines' processes, which may not be able to see that we are gone."""
    own_process.kill_all()
    os._exit(status)


class Server(uvicorn.Server):
    """uvicorn, with a drain between the signal and the end."""

    def __init__(
        self,
        config: ServerConfig,
        start: Callable[[], Registry],
        listener: socket.socket,
        ends_with_engine: bool = False,
    ):
        self.death: str | None = None  # why its engine died, where the server has ended with it
        self._ends_with_engine = ends_with_engine
        self.entrance = Entrance(config, start, self._begin)
        settings = uvicorn.Config(
            self.entrance,
            host=config.host,
            port=config.port,
            http=partial(BoundedProtocol, send_timeout=config.send_timeout),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        settings.load()
        settings.ssl = self._tls = make_context(config)
        super().__init__(settings)
        self._listener = listener
        self._lame_until: float | None = None
        self._deadline: float | None = None
        self._watchdog = Watchdog.asked_for()
        self._last_resort: threading.Timer | None = None
        self._reloading: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self.entrance.state
        if state is None or state.leaving:
            exit_now(128 + sig)
        state.leaving = True
        if not state.config.lameduck:
            state.drain()
        seconds = state.config.lameduck + state.config.shutdown_timeout + END_SECONDS
        self._last_resort = threading.Timer(seconds, exit_now, [128 + sig])
        self._last_resort.daemon = True
        self._last_resort.start()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            if self._last_resort is not None:
                self._last_resort.cancel()

    def _begin(self) -> None:
        state = self.entrance.state
        if state is None:
            self.should_exit = True
            return
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            self._reload_on_sighup(state, sys.stdin is not None and sys.stdin.isatty())
        announce(state, self._listener)
        notify("READY=1", f"STATUS=Serving {', '.join(state.registry.names)}")

    def _reload_on_sighup(self, state: ServerState, has_terminal: bool) -> None:
        """SIGHUP reads the certificate and the files of ServerState again, or ends us if the terminal was closed."""
        loop = asyncio.get_running_loop()

        def reload() -> None:
            if has_terminal and not sys.stdin.isatty():
                self.handle_exit(signal.SIGTERM, None)
            else:
                if self._tls is not None:
                    reload_certificate(self._tls, state.config)
                self._reloading = loop.create_task(state.reload())

        loop.add_signal_handler(signal.SIGHUP, reload)

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._watchdog is not None:
            self._watchdog.feed()
        state = self.entrance.state
        if state is not None and self._ends_with_engine and not state.leaving:
            self.death = next((model.served.engine.death for model in state.registry.dead() if model.served), None)
            if self.death is not None:
                return True
        if state is None or not state.leaving:
            return False
        now = time.monotonic()
        if self._lame_until is None:
            self._lame_until = now + state.config.lameduck
            notify("STOPPING=1", "STATUS=Stopping")
            if seconds := state.config.lameduck:
                _say(f"Stopping in {seconds:g} s; requests are answered until then (Ctrl-C again to exit at once)")
        if now < self._lame_until:
            return False
        if self._deadline is None:
            state.drain()
            seconds, waiting = state.config.shutdown_timeout, ""
            self._deadline = now + seconds
            if count := len(state.running):
                waiting = f": {count} running requests have {seconds:g} s to finish (Ctrl-C again to exit at once)"
            _say(f"Stopping{waiting}")
        return not state.running or now >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.entrance.state
        if state is not None:
            state.drain()
            for request in state.running:
                request.abort(stopped())
        await super().shutdown(sockets)


def announce(state: ServerState, listener: socket.socket) -> None:
    info = state.registry.find(None).info
    sizes = f"context {info.max_model_len} tokens, {info.max_num_seqs} sequences at once" if info else "on demand"
    names, base = ", ".join(state.registry.names), address(listener, scheme(state.config))
    if state.config.uds is not None:
        _say(f"Serving {names} on {base} ({sizes})")
        return
    page = f"; a page to talk to it at {base}/" if state.config.web else ""
    _say(f"Serving {names} on {base}/v1 ({sizes}; docs at {base}/docs{page})")


def _say(text: str) -> None:
    """Print a line; log it with JSON, or where standard output is closed or full, for that is no reason to stop."""
    if logs.settings().format == "json":
        logger.info(text)
        return
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s): %s", error.strerror, text)
