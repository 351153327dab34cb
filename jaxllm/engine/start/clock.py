"""What a start spends its time on."""

from __future__ import annotations

import time


class Clock:
    """Laps of the start-up, for the log."""

    def __init__(self) -> None:
        self._laps: list[str] = []
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self._laps.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)
