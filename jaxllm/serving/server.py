"""`serve(config)`: listen, load, answer, and stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

import uvicorn

from jaxllm import logs, own_process
from jaxllm.config import ServeConfig
from jaxllm.config.server import OTHER_KEY_VARIABLES, ServerConfig
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.folders import in_home, unwritable
from jaxllm.logs import LogSettings
from jaxllm.machine import share_one_heap
from jaxllm.mcp.settings import find_settings
from jaxllm.serving.access.audit import AuditLog
from jaxllm.serving.access.keys import read_keys
from jaxllm.serving.access.limits import RateLimits
from jaxllm.serving.catalog import ServerModels
from jaxllm.serving.follower import serve_as_follower
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.listening import address, listening, make_context, reload_certificate, scheme
from jaxllm.serving.http.records import LOG as REQUEST_LOG
from jaxllm.serving.loading import Entrance
from jaxllm.serving.monitor import is_local, monitoring
from jaxllm.serving.registry import Registry
from jaxllm.serving.running import Watchdog, noted, notify
from jaxllm.serving.served_model import stopped
from jaxllm.serving.state import ServerState
from jaxllm.serving.store.database import Database
from jaxllm.serving.telemetry import check_telemetry
from jaxllm.sharding.clusters import settled

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3
"""How long cancelled requests get to send their last chunk to a client that reads slowly."""
END_SECONDS = 30
"""How long everything behind config.shutdown_timeout may take, before the process ends whatever it waits for."""
IDLE_CONNECTION_SECONDS = 30
SWITCH_SECONDS = 0.0005
"""How long a thread that reads a large body, or encodes a long text, may keep the event loop waiting: Python's own 5 ms
add up, for an event takes several turns of the loop."""
_OTHERS = ("VLLM_", "LLAMA_ARG_", "OLLAMA_")
"""How the variables of other servers' settings begin."""
_LINKS = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|=\w+://)")
"""Variables that Kubernetes sets for a service that is called vllm, as VLLM_PORT=tcp://10.0.0.7:80."""


def serve(config: ServeConfig) -> None:
    """Serve over HTTP until SIGINT or SIGTERM; returns when everything has stopped.

    The models are config.model, or those of config.models and config.model_directory. The port is taken and answers
    before a model loads: see Entrance. On a signal /ready turns 503. After config.lameduck seconds new requests are
    refused, running ones get config.shutdown_timeout seconds, and what is left then ends with an error. A second signal
    exits at once. So does the first END_SECONDS after all that, whatever still hangs then, and one that comes
    while the model loads. SIGHUP has config.mcp_config, config.api_key_file and the certificate read again, and
    config.audit_log opened again. Where systemd has started us it is told of all this.

    A process that follows another answers /health alone, see `serve_as_follower`. In one that leads others the server
    ends where its engine does: whatever started the processes is to start all of them again.

    Raises ConfigError when the port cannot be had or a parser's name is unknown, and whatever building the engine
    raises, and EngineDeadError where other processes have ended the server.
    """
    if config.has_catalog:  # before there are other threads; each engine has a process of its own
        share_one_heap()
    configure_logging(config)
    config = settled(config, looks=True)
    if config.process_id:
        serve_as_follower(config)
    warn_of_open_doors(config)
    with listening(config) as listener, _ending_on_sigterm():
        models = check_settings(config)
        tool_servers, named = find_settings(config.mcp_config)
        for one in named:
            place = one.command or urlsplit(one.url or "").hostname  # no more of it: arguments and paths may be secret
            logger.info("tool server %s from %s: %s", one.label, tool_servers, place)
        try:
            with noted(models.names, address(listener, scheme(config))):
                run_server(config.of_server, models.start, listener, ends_with_engine=config.in_group)
        finally:
            models.shutdown()


def check_settings(config: ServeConfig) -> ServerModels:
    """The models to start, once nothing is wrong that can be seen before they are loaded. Raises ConfigError."""
    if (reason := unwritable(in_home(config.data_dir))) is not None:
        raise ConfigError(f"data_dir is {str(config.data_dir)!r}, where nothing can be written: {reason}")
    if config.database_url is not None:
        Database(config.database_url)  # connects to nothing
    check_telemetry(config)
    models = ServerModels(config)
    if config.api_key_file is not None:
        read_keys(config.api_key_file)
    RateLimits(config.rate_limit_store)
    make_context(config)
    if config.audit_log is not None:
        AuditLog(config.audit_log).close()
    return models


def warn_of_open_doors(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Log a server that anybody may use, and the settings of another server that are not honoured here."""
    named = config.asks_for_key or config.ssl_cert_reqs == ssl.CERT_REQUIRED
    if config.uds is None and not named and not is_local(config.host):
        logger.warning(
            "host is %s and there is no API key: everybody who reaches this address may use the server; "
            "set JAXLLM_API_KEY or --api-key-file, or --host 127.0.0.1", config.host,
        )  # fmt: skip
    others = [
        name for name, value in environ.items() if name.startswith(_OTHERS) and not _LINKS.search(f"{name}={value}")
    ]
    if ignored := sorted(set(others) - set(OTHER_KEY_VARIABLES)):
        logger.warning(
            "%s: set in the environment, but not honoured here; docs/coming-from.md says what corresponds to them",
            ", ".join(ignored),
        )


def configure_logging(config: ServerConfig) -> None:
    """One format for all; uvicorn's own notices of starting and stopping, which say less than ours, only with debug."""
    logs.configure(LogSettings(logging.getLevelNamesMapping()[config.log_level.upper()], config.log_format), "api")
    if config.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.logs_requests:
        logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)
    for chatty in (
        "mcp",
        "httpx2",
        "httpcore2",
        "alembic",
    ):  # tell urls, whole messages, plugins; ours say what matters
        logging.getLogger(chatty).setLevel(logging.CRITICAL)


def run_server(
    config: ServerConfig, start: Callable[[], Registry], listener: socket.socket, *, ends_with_engine: bool = False
) -> None:
    """Run the server on a listening socket until a signal. `start` makes the models; raises what that raises.

    With `ends_with_engine` it also ends when all its engines have died, and raises EngineDeadError.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    logger.info("listening on %s; requests get 503 until the model is loaded", address(listener, scheme(config)))
    server = Server(config, start, listener, ends_with_engine)
    with monitoring(config, lambda: server.entrance.app, lambda: server.entrance.loop):
        server.run(sockets=[listener])
    if server.entrance.error is not None:
        raise server.entrance.error
    if server.death is not None:
        raise EngineDeadError(server.death)


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

    def __init__(
        self,
        config: ServerConfig,
        start: Callable[[], Registry],
        listener: socket.socket,
        ends_with_engine: bool = False,
    ):
        self.death: str | None = None
        """Why its engine died, where the server has ended with it."""
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
        self._watchdog = Watchdog()
        self._last_resort: threading.Timer | None = None
        self._reloading: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self.entrance.state
        if state is None or state.leaving:
            _exit_now(128 + sig)
        state.leaving = True
        if not state.config.lameduck:
            state.drain()
        seconds = state.config.lameduck + state.config.shutdown_timeout + END_SECONDS
        self._last_resort = threading.Timer(seconds, _exit_now, [128 + sig])
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
        notify("READY=1", f"STATUS=Serving {', '.join(state.registry.names)}")

    def _reload_on_sighup(self, state: ServerState, has_terminal: bool) -> None:
        """SIGHUP reads files again: the certificate, and those of ServerState.

        The same signal tells that a terminal was closed: that ends us.
        """
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
            if state.config.lameduck:
                announce_lame_duck(state)
        if now < self._lame_until:
            return False
        if self._deadline is None:
            state.drain()
            self._deadline = now + state.config.shutdown_timeout
            announce_drain(state)
        return not state.running or now >= self._deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.entrance.state
        if state is not None:
            state.drain()
            for request in state.running:
                request.abort(stopped())
        await super().shutdown(sockets)


def announce(state: ServerState, listener: socket.socket) -> None:
    """Print what is being served and where."""
    info = state.registry.find(None).info
    sizes = f"context {info.max_model_len} tokens, {info.max_num_seqs} sequences at once" if info else "on demand"
    names, base = ", ".join(state.registry.names), address(listener, scheme(state.config))
    if state.config.uds is not None:
        _say(f"Serving {names} on {base} ({sizes})")
        return
    page = f"; a page to talk to it at {base}/" if state.config.web else ""
    _say(f"Serving {names} on {base}/v1 ({sizes}; docs at {base}/docs{page})")


def announce_lame_duck(state: ServerState) -> None:
    """Print how long requests are still answered."""
    _say(f"Stopping in {state.config.lameduck:g} s; requests are answered until then (Ctrl-C again to exit at once)")


def announce_drain(state: ServerState) -> None:
    """Print what the server's end waits for."""
    waiting = ""
    if state.running:
        seconds, count = state.config.shutdown_timeout, len(state.running)
        waiting = f": {count} running requests have {seconds:g} s to finish (Ctrl-C again to exit at once)"
    _say(f"Stopping{waiting}")


def _say(text: str) -> None:
    """Print a line, or log it where standard output is closed or full: that is no reason to stop serving.

    With JSON it is logged in any case, so that all that the server says can be read alike.
    """
    if logs.settings().format == "json":
        logger.info(text)
        return
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s): %s", error.strerror, text)
