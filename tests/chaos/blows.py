"""What is done to a process of the server, and how long it takes until a request is answered again."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from tests.chaos.load import Load
from tests.chaos.victim import PATIENCE, Victim
from tests.serving.conftest import wait_for

SHARE = 0.1
"""Of the time that a starved process may run."""
TURN_SECONDS = 0.05
FLOOD = 40
"""Requests at once."""

Blow = tuple[str, str]
BLOWS: list[Blow] = [
    *((kind, action) for kind in ("front", "engine", "template") for action in ("kill", "stop", "starve", "flood")),
    ("store", "lock"),
    ("store", "flood"),
]


class Chaos:
    """Strikes a server under load; `recoveries` are the seconds from each blow's end to the next right answer.

    A front process that was killed is started again at once, as a service manager does, and its start counts. A process
    is stopped or starved for `struck` seconds, and the store's lock held for as long.
    """

    def __init__(self, victim: Victim, load: Load, data_dir: Path, struck: float):
        self._victim = victim
        self._load = load
        self._data_dir = data_dir
        self._struck = struck
        self.recoveries: dict[Blow, list[float]] = {blow: [] for blow in BLOWS}

    def strike(self, blow: Blow, dice: random.Random) -> None:
        kind, action = blow
        actions: dict[str, Callable[[str], None]] = {
            "kill": self._kill, "stop": self._stop, "starve": self._starve, "flood": self._flood, "lock": self._lock,
        }  # fmt: skip
        time.sleep(dice.uniform(0.0, 0.2))
        began = time.monotonic()
        actions[action](kind)
        if action != "kill":  # all others are over only now
            began = time.monotonic()
        wait_for(self._load.probe, PATIENCE)
        self.recoveries[blow].append(time.monotonic() - began)

    def table(self) -> str:
        """How often each was struck, and the recoveries in the middle and at worst; rows of Markdown."""
        rows = ["| Process | What | Times | Median | Longest |", "|---|---|---|---|---|"]
        for (kind, action), seconds in self.recoveries.items():
            if seconds:
                middle, worst = sorted(seconds)[len(seconds) // 2], max(seconds)
                rows.append(f"| {kind} | {action} | {len(seconds)} | {middle:.2f} s | {worst:.2f} s |")
        return "\n".join(rows)

    def _target(self, kind: str) -> psutil.Process | None:
        """The process; templates' ones are started by the first chat that finds none."""
        found = self._victim.process(kind)
        return found if found is not None and found.is_running() else None

    def _kill(self, kind: str) -> None:
        if kind == "front":
            self._victim.kill()
            self._victim.start()
        elif (process := self._target(kind)) is not None:
            _send(process, signal.SIGKILL)

    def _stop(self, kind: str) -> None:
        if (process := self._target(kind)) is not None:
            _send(process, signal.SIGSTOP)
            time.sleep(self._struck)
            _send(process, signal.SIGCONT)

    def _starve(self, kind: str) -> None:
        until = time.monotonic() + self._struck
        if (process := self._target(kind)) is None:
            return
        while time.monotonic() < until:
            _send(process, signal.SIGSTOP)
            time.sleep(TURN_SECONDS * (1 - SHARE))
            _send(process, signal.SIGCONT)
            time.sleep(TURN_SECONDS * SHARE)

    def _flood(self, kind: str) -> None:
        self._load.flood(kind, FLOOD)

    def _lock(self, kind: str) -> None:
        """Another program writes to the database for as long."""
        with closing(sqlite3.connect(self._data_dir / "jaxllm.db", timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(self._struck)
            connection.execute("COMMIT")


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile, as those do that nobody asks
        process.send_signal(number)
