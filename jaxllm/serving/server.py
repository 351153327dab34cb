"""`serve(config)`: check the settings, take the port, run the server; or follow the process that does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxllm import logs
from jaxllm.config import ServeConfig
from jaxllm.config.server import ServerConfig
from jaxllm.config.translation import other_variables
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.folders import in_home, unwritable
from jaxllm.logs import LogSettings
from jaxllm.machine import share_one_heap
from jaxllm.mcp.settings import find_settings
from jaxllm.serving.access.keys import RateLimits, read_keys
from jaxllm.serving.catalog import ServerModels
from jaxllm.serving.entrance import Server, exit_now
from jaxllm.serving.http.connections import serve_on_thread
from jaxllm.serving.http.listening import address, bind, listening, make_context, scheme
from jaxllm.serving.request_log import LOG as REQUEST_LOG
from jaxllm.serving.request_log import AuditLog
from jaxllm.serving.running import noted
from jaxllm.serving.state import Registry
from jaxllm.serving.status import is_local, monitoring
from jaxllm.serving.store.database import Database
from jaxllm.serving.telemetry import check_telemetry
from jaxllm.sharding.clusters import settled

if TYPE_CHECKING:
    from jaxllm.engine.scale.lockstep.meeting import Group

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""The longest that a busy thread keeps the event loop waiting. Python's own 5 ms add up over the turns of an event."""
OFFERED_TO_ALL = "their tools are offered to every chat and response that brings no tools (mcp_inject)"
OFFERED_ON_DEMAND = "their tools are offered where a request asks for them; --mcp-inject offers them to all"


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
    models = check_settings(config)
    with listening(config) as listener, _ending_on_sigterm():
        tool_servers, named = find_settings(config.mcp_config)
        for one in named:
            place = one.command or urlsplit(one.url or "").hostname  # no more of it: arguments and paths may be secret
            logger.info("tool server %s from %s: %s", one.label, tool_servers, place)
        if named:
            logger.info("%s", OFFERED_TO_ALL if config.mcp_inject else OFFERED_ON_DEMAND)
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
    """Log a server that anybody may use, and what becomes of each variable of another server."""
    named = config.asks_for_key or config.ssl_cert_reqs == ssl.CERT_REQUIRED
    if config.uds is None and not named and not is_local(config.host):
        logger.warning(
            "host is %s and there is no API key: everybody who reaches this address may use the server; "
            "set JAXLLM_API_KEY or --api-key-file, or --host 127.0.0.1", config.host,
        )  # fmt: skip
    for variable in other_variables(environ):
        logger.warning("%s", variable)


def configure_logging(config: ServerConfig) -> None:
    """One format for all; uvicorn's own notices of starting and stopping only with debug."""
    logs.configure(LogSettings(logging.getLevelNamesMapping()[config.log_level.upper()], config.log_format), "api")
    if config.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.logs_requests:
        logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)
    for chatty in ("mcp", "httpx2", "httpcore2", "alembic"):  # they tell urls, whole messages, plugins
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
    before = signal.signal(signal.SIGTERM, lambda signum, _: exit_now(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve_as_follower(config: ServeConfig) -> NoReturn:
    """Follow process 0 until it ends the group; the process ends with it.

    /health answers from when all processes have come, with 503 until this one can run steps. Each of several processes
    on a machine takes the next port after config.port.

    After SIGTERM or SIGINT the process stays for as long as a server's requests get to finish: process 0 is most
    likely told to stop too, and ends the group in order. A second signal ends it at once.

    Raises ConfigError, ModelNotFoundError and CheckpointError as the server of process 0 would.
    """
    from jaxllm.engine.scale.lockstep.follower import Follower
    from jaxllm.engine.start.follow import follow
    from jaxllm.engine.start.leave import leave

    ready = threading.Event()
    asked: list[int] = []

    async def health(_: Request) -> Response:
        is_ready = ready.is_set()
        body: dict[str, object] = {"status": "ok" if is_ready else "loading"}
        body |= {"process_id": config.process_id, "num_processes": config.num_processes}
        return JSONResponse(body, 200 if is_ready else 503)

    def begin(group: Group) -> None:
        listener = bind(config.host, config.port + group.place if config.port else 0)
        serve_on_thread(Starlette(routes=[Route("/health", health)]), listener, "health", make_context(config))
        logger.info("/health is at %s; process 0 answers requests", address(listener, scheme(config)))

        def stop(number: int, _: object) -> None:
            asked.append(number)
            if len(asked) > 1:
                leave(128 + number)
            assert isinstance(group.hold, Follower)
            group.hold.stop_within(config.lameduck + config.shutdown_timeout, signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    follow(config.of_model, begin, ready.set)
