"""Adapters in host memory, read when the first request asks for them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from jaxllm.engine.features.adapters.reading import AdapterReader, AdapterRows
from jaxllm.errors import CheckpointError, InvalidRequestError
from jaxllm.requests.steering import AdapterUse


def check_adapters(uses: Sequence[AdapterUse], most: int) -> None:
    """Raises InvalidRequestError: an engine with places for `most` adapters cannot run a request with these."""
    if most == 0:
        raise InvalidRequestError(f"adapter {uses[0].name!r}: this engine runs without adapters; see enable_lora")
    if len(uses) > most:
        raise InvalidRequestError(
            f"{len(uses)} adapters are asked for at once; accepted are max_loras, which is {most}"
        )
    names = [use.name for use in uses]
    twice = next((use.name for use in uses if sum(other.id == use.id for other in uses) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"the adapters are {', '.join(names)}: {twice!r} is among them twice")


class AdapterStore:
    """Keeps the rows of the adapters used last. Any thread may ask for some."""

    def __init__(self, reader: AdapterReader, most: int):
        self._reader = reader
        self._most = most
        self._rows: OrderedDict[int, AdapterRows] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def known(self, use: AdapterUse) -> AdapterRows | None:
        """The rows of an adapter, if it has been read."""
        with self._lock:
            if use.id in self._rows:
                self._rows.move_to_end(use.id)
            return self._rows.get(use.id)

    def read(self, use: AdapterUse) -> AdapterRows:
        """The rows of an adapter, which are read now if need be.

        Raises:
            InvalidRequestError: it cannot be read, or not be used with this model.
        """
        with self._reading:  # two requests for one adapter read it once
            rows = self.known(use)
            if rows is None:
                try:
                    rows = self._reader.read(use.path)
                except CheckpointError as error:
                    raise InvalidRequestError(f"adapter {use.name!r}: {error}") from error
                with self._lock:
                    self._rows[use.id] = rows
                    while len(self._rows) > self._most:
                        self._rows.popitem(last=False)
        return rows


class AdapterPlaces:
    """Places in the tables of adapters, held by the requests that run; those that nobody holds keep their adapter.

    When an adapter needs a place, it gets one that is empty, or that of the adapter that was unused for the longest.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._place_of: dict[int, int] = {}
        """By adapter, the longest unused first."""
        self._holders: dict[int, int] = {}

    def fits(self, adapters: Sequence[int]) -> bool:
        """Whether all these adapters can be on the devices together with those that are held."""
        missing = sum(adapter not in self._place_of for adapter in adapters)
        idle = sum(adapter not in self._holders and adapter not in adapters for adapter in self._place_of)
        return missing <= len(self._free) + idle

    def take(self, adapters: Sequence[int]) -> tuple[list[int], list[int]]:
        """Hold a place for each of the adapters, which fit: their places, and those of them that have to be loaded."""
        entered = []
        for adapter in adapters:
            if adapter not in self._place_of:
                self._place_of[adapter] = self._free.pop() if self._free else self._evict(adapters)
                entered.append(adapter)
            self._holders[adapter] = self._holders.get(adapter, 0) + 1
            self._place_of[adapter] = self._place_of.pop(adapter)  # the last used is the last
        return [self._place_of[adapter] for adapter in adapters], entered

    def release(self, adapters: Sequence[int]) -> None:
        """A request that took them runs no longer."""
        for adapter in adapters:
            self._holders[adapter] -= 1
            if not self._holders[adapter]:
                del self._holders[adapter]

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that the places agree with the adapters `held` by all running requests."""
        counts = Counter(adapter for adapters in held for adapter in adapters)
        assert counts == self._holders, "holders of adapters do not match the running requests"
        assert sorted([*self._free, *self._place_of.values()]) == list(range(self.count)), "a place was lost"
        assert set(counts) <= set(self._place_of), "an adapter is held that has no place"

    def _evict(self, wanted: Sequence[int]) -> int:
        idle = next(a for a in self._place_of if a not in self._holders and a not in wanted)
        return self._place_of.pop(idle)
