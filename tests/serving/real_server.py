"""A server of a real model in a process of its own, and what its gauges say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.serving.conftest import wait_for
from tests.support.real_models import SHAPES

_PROGRAM = """
import json, sys
from jaxllm.config import ServeConfig
from jaxllm.serving.server import serve
if __name__ == "__main__":
    serve(ServeConfig(**json.loads(sys.argv[1])))
"""


@contextmanager
def served(model: str | None, shapes: Mapping[str, Any] = SHAPES, **settings: Any) -> Iterator[str]:
    """The base URL of a server of `model`, or of the models that `settings` name; it must end cleanly when told to."""
    own = {"port": 0, "compile_cache_dir": os.environ.get("TESTS_COMPILE_CACHE")}  # None: not kept
    named = {} if model is None else {"model": model}
    arguments = json.dumps({**shapes, **own, **named, **settings})
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Serving "):
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()} before it served")
        yield line.split(" on ")[1].split("/v1")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def server_process(url: str) -> psutil.Process:
    """Whoever listens at the URL's port."""
    port = int(url.rsplit(":", 1)[1])
    owner = next(
        c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"
    )
    return psutil.Process(owner)


def engine_process(server: psutil.Process) -> psutil.Process:
    """The one of a server's processes that runs the engine: the only one that is held by a pipe."""
    (engine,) = (child for child in server.children() if "own_process import enter" in " ".join(child.cmdline()))
    return engine


def gauges(url: str) -> dict[str, float]:
    """The server's own metrics by name."""
    lines = [
        line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("jaxllm:")
    ]
    return {name.split("{")[0].removeprefix("jaxllm:"): float(value) for name, value in lines}


def assert_idle(url: str) -> None:
    """Nothing runs, waits or holds a page, now or within ten seconds."""

    def idle() -> bool:
        seen = gauges(url)
        return seen["num_requests_running"] == seen["num_requests_waiting"] == seen["kv_cache_usage_perc"] == 0

    wait_for(idle, 10)
