"""The server that is struck: started as a service manager would, its processes by kind, and what they hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serving.conftest import wait_for

PATIENCE = 90.0
"""Seconds on the clock in which anything here must have come back, on a machine that does other things as well."""
_PROGRAM = """
import json, sys
from jaxllm.config import ServeConfig
from jaxllm.serving.server import serve
if __name__ == "__main__":
    serve(ServeConfig(**json.loads(sys.argv[1])))
"""
KINDS = {
    "engine": "own_process import enter",
    "template": "jaxllm.text.template_process",
}
"""What the command line of a process of each kind has; the front process is the server itself."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "kv_cache_memory": "16MiB", "decode_buckets": (4,), "prefill_buckets": (64,), "shutdown_timeout": 2,
}  # fmt: skip


class Victim:
    """A server on a port and a data directory that it keeps, however often it is started again.

    `deaths` is how often its front process was killed: requests that were under way then may break off. It `is_up` from
    when it is ready until then.
    """

    def __init__(self, model: Path, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.deaths = 0
        self.is_up = threading.Event()
        cache = os.environ.get("TESTS_COMPILE_CACHE")
        own = {"model": str(model), "served_model_name": "tiny", "port": self.port, "data_dir": str(folder / "data")}
        self._arguments = json.dumps(SETTINGS | {"compile_cache_dir": cache} | own)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, self._arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.front = psutil.Process(self._popen.pid)
        wait_for(self.is_ready, PATIENCE)
        self.is_up.set()

    def is_ready(self) -> bool:
        assert self._popen.poll() is None, f"the server ended by itself: {self.log.read_text()[-2000:]}"
        try:
            return httpx.get(f"{self.url}/ready", timeout=5, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def process(self, kind: str) -> psutil.Process | None:
        """One of that kind, if it runs now."""
        if kind == "front":
            return self.front
        return next(iter(self.processes(kind)), None)

    def processes(self, kind: str) -> list[psutil.Process]:
        found = []
        for child in self.family():
            try:
                if KINDS[kind] in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue  # it has just ended
        return found

    def family(self) -> list[psutil.Process]:
        return self.front.children(recursive=True)

    def kill(self) -> None:
        """As the system does that runs out of memory; nobody it has started may outlive it for long."""
        family = self.family()
        self.is_up.clear()
        self.deaths += 1
        self.front.send_signal(signal.SIGKILL)
        self._popen.wait()
        wait_for(lambda: not any(map(_runs, family)), PATIENCE)

    def stop(self) -> None:
        """SIGTERM; it ends cleanly, and takes along whom it has started."""
        family = self.family()
        self._popen.send_signal(signal.SIGTERM)
        assert self._popen.wait(PATIENCE) == 0, self.log.read_text()[-2000:]
        wait_for(lambda: not any(map(_runs, family)), PATIENCE)

    def end(self) -> None:
        """Whatever state it is in."""
        for process in (self.front, *(self.family() if self.front.is_running() else ())):
            if _runs(process):
                process.kill()
        self._popen.wait()

    def held(self) -> dict[str, int]:
        """What a leak would make grow: open files, threads and processes."""
        return {
            "files": self.front.num_fds(),
            "threads": self.front.num_threads(),
            "processes": len(self.family()),
        }


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def wait_until_still(victim: Victim) -> dict[str, int]:
    """What it holds once that has been the same for a second."""
    seen, since = victim.held(), time.monotonic()
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        now = victim.held()
        if now != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() < give_up, f"it never comes to rest: {seen}"
    return seen
