from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.settings import ServerSettings
from tests.sharding.ports import free_port

T = TypeVar("T")

HERE = Path(__file__).parent
TOOL_SERVER = str(HERE / "tool_server.py")
BAD_SERVER = str(HERE / "bad_server.py")
OLD_SERVER = str(HERE / "old_server.py")
LIGHT_SERVER = str(HERE / "light_server.py")


class Loop:
    """An event loop in a thread of its own, as a server has it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def python(label: str, *command: str, **fields: Any) -> ServerSettings:
    """A stdio server that is a program of ours."""
    return ServerSettings(label, "stdio", command=sys.executable, args=command, **fields)


def wait_for(condition: Callable[[], Any], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Listening:
    """A test server that is reached by a url."""

    def __init__(self, kind: str, key: str | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/{'sse' if kind == 'sse' else 'mcp'}"
        command = [sys.executable, TOOL_SERVER, kind, str(self.port), *([key] if key else [])]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def settle(loop: Loop, servers: ToolServers, seconds: float = 30.0) -> None:
    """Start them, and wait until it is known of each how that went."""

    async def begin() -> None:
        await servers.start()
        for server in servers.servers.values():
            await server.ready(seconds)

    loop.run(begin(), seconds + 5)
