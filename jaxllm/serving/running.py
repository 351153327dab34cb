"""The machine is told which servers run: by files in the cache folder for `jaxllm ps`, and systemd by sd_notify(3)."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from jaxllm.config import CACHE_DIR

logger = logging.getLogger(__name__)

FOLDER = CACHE_DIR / "running"


class RunningServer(NamedTuple):
    """A process that serves `models` at `address`; it and its engines' processes hold `nbytes` of memory."""

    pid: int
    models: list[str]
    address: str
    nbytes: int


@contextmanager
def noted(models: Sequence[str], address: str) -> Iterator[None]:
    """This process is listed as a server inside. Where no file can be written one warning says that it is not."""
    file = FOLDER / f"{os.getpid()}.json"
    note = {"started": psutil.Process().create_time(), "models": list(models), "address": address}
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        logger.warning("`jaxllm ps` will not list this server: %s; set XDG_CACHE_HOME", error)
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """The servers that run now. A file whose process has ended, or is another by now, is removed."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        server = _running(file)
        if server is None:
            file.unlink(missing_ok=True)
        else:
            found.append(server)
    return found


def _running(file: Path) -> RunningServer | None:
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
        process = psutil.Process(int(file.stem))
        if abs(process.create_time() - note["started"]) > 1:  # its number belongs to another process now
            return None
        family = [process, *process.children(recursive=True)]
        nbytes = sum(member.memory_info().rss for member in family)
        return RunningServer(process.pid, note["models"], note["address"], nbytes)
    except (psutil.Error, OSError, ValueError, KeyError, TypeError):
        return None  # it has ended meanwhile, or the file is none of ours


def notify(*lines: str) -> None:
    """Send lines such as READY=1 to who has started this process, where that has said where to."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.warning("systemd was not told %s: %s", lines[0], error.strerror)


class Watchdog:
    """Tells systemd every so many seconds that the event loop turns, as long as it is fed; it restarts us otherwise."""

    def __init__(self, every: float):
        self._every = every
        self._next = 0.0

    @classmethod
    def asked_for(cls) -> Watchdog | None:
        """One that tells it twice as often as WatchdogSec asks for; None where that is not set."""
        asked = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(int(asked) / 2e6) if asked.isdecimal() and int(asked) and for_us else None

    def feed(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            notify("WATCHDOG=1")
