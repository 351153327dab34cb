"""Checks pages and states whenever the engine is idle, so that a lost one is reported soon after it was lost."""

from __future__ import annotations

import logging
import time

from jaxllm.engine.adapters.places import AdapterPlaces
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.state_cache import StateCache

logger = logging.getLogger(__name__)

FULL_CHECK_SECONDS = 60.0
"""The whole pool is looked through at most this often (0.1 ms for each 1,000 pages), unless some of it is missing."""


class IdleCheck:
    """Logs an error if pages or states are held although no request is left, or if the pool contradicts itself.

    The engine goes on with what is left. A fault is reported once, and again when it changes.
    """

    def __init__(self, pool: PagePool, states: StateCache | None = None, adapters: AdapterPlaces | None = None):
        self._pool = pool
        self._states = states
        self._adapters = adapters
        self._last = -FULL_CHECK_SECONDS
        self._known: tuple[str, int] | None = None

    def run(self) -> None:
        """Check both; to be called when no request holds pages."""
        pool, now = self._pool, time.monotonic()
        lost = pool.num_pages - 1 - pool.num_free
        if lost == 0 and now - self._last < FULL_CHECK_SECONDS:
            return
        self._last = now
        try:
            pool.check([])
            if self._states is not None:
                self._states.check([])
            if self._adapters is not None:
                self._adapters.check([])
            fault = None
        except AssertionError as error:
            fault = (str(error).partition("\n")[0], lost)
        if fault is not None and fault != self._known:
            logger.error(
                "the KV cache is broken, which is a fault of jaxllm: %s; although no request is left, %d of its %d "
                "pages are held, which no request can use until the engine is restarted",
                *fault,
                pool.num_pages - 1,
            )
        self._known = fault
