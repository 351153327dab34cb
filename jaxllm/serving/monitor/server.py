"""The monitor port's own server: a thread with an event loop, which answers also while the server's is busy."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.origins import LOCAL_NAMES, OriginGuard
from jaxllm.serving.listener import address, bind
from jaxllm.serving.monitor.routes import Monitor

logger = logging.getLogger(__name__)

END_SECONDS = 3.0
"""How long the end waits for what is being answered."""


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
