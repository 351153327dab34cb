"""Pages and states in host memory, the longest unused of which give way."""

from __future__ import annotations

import array
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.engine.core.pages import PrefixNode

RowKind = Literal["page", "state"]
ROW_KINDS: tuple[RowKind, RowKind] = ("page", "state")


class CacheRow(NamedTuple):
    """A row of the layers' buffers: a page, or the state of one sequence or prefix."""

    kind: RowKind
    number: int


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


Digest = bytes
"""32 bytes: of a prefix that ends with a full page, or of the state after one."""


class PrefixDigests:
    """Digests of a page pool's nodes.

    Prefixes that begin from nothing, or from a cache salt, are called the same in every process. Others depend on what
    is known by numbers of this process only, such as adapters: no other process finds them.
    """

    def __init__(self) -> None:
        self._here = secrets.token_bytes(16)
        self._of: dict[PrefixNode, Digest] = {}

    def __getitem__(self, node: PrefixNode) -> Digest | None:
        """None of a node whose page was given away."""
        return self._of.get(node) if isinstance(node, int) else self.of_root(node)

    def of_root(self, root: PrefixNode) -> Digest:
        """Where prefixes of a root begin."""
        if root is None or isinstance(root, str):
            return hashlib.blake2b(repr(root).encode(), digest_size=32).digest()
        return hashlib.blake2b(repr(root).encode(), digest_size=32, key=self._here).digest()

    def add(self, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> Digest | None:
        """The digest of a new node; None where nothing is known of its parent, so that nobody finds it."""
        before = self[parent]
        if before is None:
            return None
        self._of[node] = longer(before, tokens)
        return self._of[node]

    def forget(self, node: PrefixNode) -> Digest | None:
        """The digest of a node that is no more."""
        return self._of.pop(node, None)


def of_state(prefix: Digest) -> Digest:
    """Of the state after a prefix, which is kept among the pages and called otherwise than all of them."""
    return hashlib.blake2b(prefix + b"state", digest_size=32).digest()


def longer(before: Digest, tokens: Sequence[int]) -> Digest:
    """Of the prefix that has a page of `tokens` more than `before`."""
    return hashlib.blake2b(before + array.array("i", tokens).tobytes(), digest_size=32).digest()


def chain(begin: Digest, tokens: Sequence[int], page_size: int) -> list[Digest]:
    """Of every prefix of `tokens` in whole pages, the shortest first, behind the prefix `begin`."""
    found = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        begin = longer(begin, tokens[start : start + page_size])
        found.append(begin)
    return found
