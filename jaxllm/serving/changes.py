"""Wakes those who watch something that changes in other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Changes:
    """Rings the bells of all who watch; any thread, and a signal handler, may ring."""

    def __init__(self) -> None:
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def ring(self) -> None:
        """Something has changed."""
        for bell, loop in list(self._bells.items()):
            with suppress(RuntimeError):  # the loop was closed, and who watched there is gone
                loop.call_soon_threadsafe(bell.set)

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """A bell on the running event loop that is set at each change."""
        bell = asyncio.Event()
        self._bells[bell] = asyncio.get_running_loop()
        try:
            yield bell
        finally:
            del self._bells[bell]
