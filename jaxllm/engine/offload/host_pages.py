"""Pages and states in host memory, the longest unused of which give way."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from jaxllm.engine.offload.prefix_digests import Digest

Page = np.ndarray
"""What all layers keep of one page's tokens, or the states of all layers after a prefix, as bytes: uint8 `[nbytes]`.
Nobody changes one."""


class HostPages:
    """As many pages and states as a budget holds. Any thread may use it."""

    def __init__(self, budget: int, on_full: Callable[[Digest, Page], None] = lambda digest, page: None):
        """`budget` is in bytes; `on_full` is called, in the thread that adds another, with each page that gives way."""
        self.budget = budget
        self._on_full = on_full
        self._pages: OrderedDict[Digest, Page] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._pages

    @property
    def nbytes(self) -> int:
        """What they take together."""
        return self._nbytes

    def add(self, digest: Digest, page: Page) -> None:
        """Keep a page, as the one used last."""
        dropped = []
        with self._lock:
            if digest in self._pages:
                self._pages.move_to_end(digest)
                return
            self._pages[digest] = page
            self._nbytes += page.nbytes
            while self._nbytes > self.budget:
                dropped.append(self._pages.popitem(last=False))
                self._nbytes -= dropped[-1][1].nbytes
        for lost in dropped:
            self._on_full(*lost)

    def get(self, digest: Digest) -> Page | None:
        """A page, which is the one used last now; None if it is not here."""
        with self._lock:
            page = self._pages.get(digest)
            if page is not None:
                self._pages.move_to_end(digest)
            return page

    def items(self) -> list[tuple[Digest, Page]]:
        """All that is here, the longest unused first."""
        with self._lock:
            return list(self._pages.items())
