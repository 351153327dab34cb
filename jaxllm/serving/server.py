"""`serve(config)`: listen, load, answer, and stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

import uvicorn

from jaxllm import own_process
from jaxllm.config import ServeConfig, ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.folders import unwritable
from jaxllm.mcp.config_file import find_settings
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.request_id import LOG as REQUEST_LOG
from jaxllm.serving.listener import address, listening
from jaxllm.serving.loading import Entrance
from jaxllm.serving.registry import Registry
from jaxllm.serving.running import noted
from jaxllm.serving.start_models import ServerModels
from jaxllm.serving.state import ServerState

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3
"""How long cancelled requests get to send their last chunk to a client that reads slowly."""
END_SECONDS = 30
"""How long everything behind config.shutdown_timeout may take, before the process ends whatever it waits for."""
IDLE_CONNECTION_SECONDS = 30
SWITCH_SECONDS = 0.0005
"""How long a thread that reads a large body, or encodes a long text, may keep the event loop waiting: Python's own 5 ms
add up, for an event takes several turns of the loop."""


def serve(config: ServeConfig) -> None:
    """Serve over HTTP until SIGINT or SIGTERM; returns when everything has stopped.

    The models are config.model, or those of config.models and config.model_directory. The port is taken and answers
    before a model loads: see Entrance. On a signal /ready turns 503, new requests are
    refused, running ones get config.shutdown_timeout seconds and then end with finish_reason "abort". A second signal
    exits at once. So does the first after shutdown_timeout + END_SECONDS, whatever still hangs then, and one that comes
    while the model loads. SIGHUP has config.mcp_config read again.

    Raises ConfigError when the port cannot be had or a parser's name is unknown, and whatever building the engine
    raises.
    """
    configure_logging(config)
    with listening(config) as listener, _ending_on_sigterm():
        if (reason := unwritable(config.data_dir.expanduser())) is not None:
            raise ConfigError(f"data_dir is {str(config.data_dir)!r}, where nothing can be written: {reason}")
        models = ServerModels(config)  # refuses what is wrong before anything is loaded
        tool_servers, named = find_settings(config.mcp_config)
        for one in named:
            place = one.command or urlsplit(one.url or "").hostname  # no more of it: arguments and paths may be secret
            logger.info("tool server %s from %s: %s", one.label, tool_servers, place)
        try:
            with noted(models.names, address(listener)):
                run_server(config.of_server, models.start, listener)
        finally:
            models.shutdown()


def configure_logging(config: ServerConfig) -> None:
    """One format for all; uvicorn's own notices of starting and stopping, which say less than ours, only with debug."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.enable_request_logging:
        logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)
    for chatty in ("mcp", "httpx2", "httpcore2"):  # tell urls and whole messages; jaxllm.mcp says what matters
        logging.getLogger(chatty).setLevel(logging.CRITICAL)


def run_server(config: ServerConfig, start: Callable[[], Registry], listener: socket.socket) -> None:
    """Run the server on a listening socket until a signal. `start` makes the models; raises what that raises."""
    sys.setswitchinterval(SWITCH_SECONDS)
    logger.info("listening on %s; requests get 503 until the model is loaded", address(listener))
    server = Server(config, start, listener)
    server.run(sockets=[listener])
    if server.entrance.error is not None:
        raise server.entrance.error


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """While the server itself does not listen to it, SIGTERM ends us at once, and not us alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda signum, _: _exit_now(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_now(status: int) -> NoReturn:
    """Without waiting for anything, and with the engines' processes, which may not be able to see that we are gone."""
    own_process.kill_all()
    os._exit(status)


class Server(uvicorn.Server):
    """uvicorn, with a drain between the signal and the end."""

    def __init__(self, config: ServerConfig, start: Callable[[], Registry], listener: socket.socket):
        self.entrance = Entrance(config, start, self._begin)
        settings = uvicorn.Config(
            self.entrance,
            host=config.host,
            port=config.port,
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        super().__init__(settings)
        self._listener = listener
        self._deadline: float | None = None
        self._last_resort: threading.Timer | None = None
        self._reloading: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self.entrance.state
        if state is None or state.draining:
            _exit_now(128 + sig)
        state.drain()
        self._last_resort = threading.Timer(state.config.shutdown_timeout + END_SECONDS, _exit_now, [128 + sig])
        self._last_resort.daemon = True
        self._last_resort.start()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            if self._last_resort is not None:
                self._last_resort.cancel()

    def _begin(self) -> None:
        """The models are there, or never will be."""
        state = self.entrance.state
        if state is None:
            self.should_exit = True
            return
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            self._reload_on_sighup(state, sys.stdin is not None and sys.stdin.isatty())
        announce(state, self._listener)

    def _reload_on_sighup(self, state: ServerState, has_terminal: bool) -> None:
        """SIGHUP reads the tool servers' file again. The same signal tells that a terminal was closed: that ends us."""
        loop = asyncio.get_running_loop()

        def reload() -> None:
            if has_terminal and not sys.stdin.isatty():
                self.handle_exit(signal.SIGTERM, None)
            else:
                self._reloading = loop.create_task(state.reload_tool_servers())

        loop.add_signal_handler(signal.SIGHUP, reload)

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        state = self.entrance.state
        if state is None or not state.draining:
            return False
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + state.config.shutdown_timeout
            announce_drain(state)
        return not state.running or now >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.entrance.state
        if state is not None:
            state.drain()
            for request in state.running:
                request.abort()
        await super().shutdown(sockets)


def announce(state: ServerState, listener: socket.socket) -> None:
    """Print what is being served and where."""
    info = state.registry.find(None).info
    sizes = f"context {info.max_model_len} tokens, {info.max_num_seqs} sequences at once" if info else "on demand"
    names, base = ", ".join(state.registry.names), address(listener)
    if state.config.uds is not None:
        _say(f"Serving {names} on {base} ({sizes})")
        return
    page = f"; a page to talk to it at {base}/" if state.config.web else ""
    _say(f"Serving {names} on {base}/v1 ({sizes}; docs at {base}/docs{page})")


def announce_drain(state: ServerState) -> None:
    """Print what the server's end waits for."""
    waiting = ""
    if state.running:
        seconds, count = state.config.shutdown_timeout, len(state.running)
        waiting = f": {count} running requests have {seconds:g} s to finish (Ctrl-C again to exit at once)"
    _say(f"Stopping{waiting}")


def _say(text: str) -> None:
    """Print a line, or log it where standard output is closed or full: that is no reason to stop serving."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s): %s", error.strerror, text)
