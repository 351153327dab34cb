from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import fastapi.routing
import httpcore2
import pytest
import uvicorn
from fastapi.testclient import TestClient

from jaxllm.config import ServeConfig
from jaxllm.serving.app import API_ROUTERS
from jaxllm.serving.dialects.llama_cpp import native_router
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.listening import bind
from tests.serving.fake_engine import FakeEngine, app_of
from tests.serving.kept_processes import keeping_processes

PATIENCE = 30.0
"""Seconds on the clock for what takes less of the processor, on a machine that does other things as well."""


@contextmanager
def quickly(seconds: float) -> Iterator[None]:
    """What is done here takes less of this process's processor time, whatever else the machine does."""
    used, began = time.process_time(), time.monotonic()
    yield
    assert time.process_time() - used < seconds
    assert time.monotonic() - began < PATIENCE


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Each of the hundreds of HTTP clients would take 50 ms to read the system's, which none of them uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def routes_read_once() -> Iterator[None]:
    """FastAPI reads the routes of each application: a fifth of a second for each of thousands.

    What it finds is the same wherever a router is included under the same prefix, with a key or without. Older versions
    of FastAPI read them elsewhere.
    """
    read = getattr(fastapi.routing, "_EffectiveRouteContext", None)
    if read is None:
        yield
        return
    build, found = read.from_api_route, {}

    def from_api_route(*, original_route: Any, include_context: Any) -> Any:
        how = include_context
        if how.included_router not in (native_router, *API_ROUTERS):  # one of this application alone
            return build(original_route=original_route, include_context=how)
        key = id(original_route), how.prefix, how.include_in_schema, bool(how.dependencies)
        if key not in found:
            how = replace(how, dependency_overrides_provider=None)  # the application, which overrides none
            found[key] = build(original_route=original_route, include_context=how)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "from_api_route", from_api_route)
        yield


@pytest.fixture(scope="package", autouse=True)
def processes_started_once() -> Iterator[None]:
    with keeping_processes():
        yield


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    clients: list[TestClient] = []

    def make(engine: FakeEngine, others: Mapping[str, FakeEngine] | None = None, **settings: Any) -> TestClient:
        client = TestClient(
            app_of(ServeConfig(**{"model": "fake", "data_dir": tmp_path / "data"} | settings), engine, others),
            base_url="http://localhost",
            raise_server_exceptions=False,
        )
        clients.append(client.__enter__())
        return client

    yield make
    for client in clients:
        client.__exit__()


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: FakeEngine) -> TestClient:
    return make_client(engine)


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serve an engine on a real socket in a thread; returns the base URL."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(engine: FakeEngine, tool_servers: Any = None, **settings: Any) -> str:
        config = ServeConfig(**{"model": "fake", "port": 0, "data_dir": tmp_path / "data"} | settings)
        listener = bind(config.host, config.port)
        port = listener.getsockname()[1]
        app = app_of(config, engine)
        if tool_servers is not None:
            app.state.server.tool_servers = tool_servers
        protocol: Any = partial(BoundedProtocol, send_timeout=config.send_timeout)
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        wait_for(lambda: server.started)
        return f"http://127.0.0.1:{port}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive() and not server.lifespan.shutdown_failed


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
