"""What was used lately, as far as a budget holds it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Recent(Generic[Kept]):
    """As many things as a budget holds, by keys, the longest unused dropped first. Any thread may use it."""

    def __init__(self, budget: int, nbytes_of: Callable[[Kept], int], kept: OrderedDict[bytes, Kept] | None = None):
        """`kept` is there already, the longest unused first."""
        self.budget = budget
        self._kept, self._nbytes_of = OrderedDict() if kept is None else kept, nbytes_of
        self.nbytes = sum(map(nbytes_of, self._kept.values()))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes) -> Kept | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, kept: Kept) -> list[tuple[bytes, Kept]]:
        """Keep something; what another thread has kept there meanwhile stays. Returns what is dropped for it."""
        dropped = []
        with self._lock:
            if key not in self._kept:
                self._kept[key] = kept
                self.nbytes += self._nbytes_of(kept)
            while self.nbytes > self.budget:
                dropped.append(self._kept.popitem(last=False))
                self.nbytes -= self._nbytes_of(dropped[-1][1])
        return dropped

    def forget(self, key: bytes) -> None:
        with self._lock:
            if key in self._kept:
                self.nbytes -= self._nbytes_of(self._kept.pop(key))
