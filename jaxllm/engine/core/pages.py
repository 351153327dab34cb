"""The owner of KV pages, and the search for pages that hold a prefix of a request. Pages are numbers here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.engine.core.feature import Feature

if TYPE_CHECKING:
    from jaxllm.engine.core.registry import Features
    from jaxllm.engine.core.request import Request

PrefixNode = int | str | tuple | None
"""A place in the tree of cached prefixes: a root (the cache salt, or a tuple with it) or a page's node."""


NO_TOKEN = 2**31
"""Numbers from here on stand for something else than a token, where prefixes are compared; see `Feature.keys`."""


class PagePool:
    """Reference-counted pages with prefix sharing.

    Full pages are found again by what comes before: a page's key is its parent's node and its own tokens, so a chain of
    keys spells out the whole prefix, and equal keys are equal tokens, not equal hashes. Pages that no sequence holds
    keep their contents and their key until they are needed, the longest unused first. Page 0 belongs to no sequence:
    padding reads and writes it.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True):
        """`num_pages` counts page 0, so one fewer can be allocated."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._page_of: dict[tuple[PrefixNode, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[PrefixNode, tuple[int, ...]]] = {}
        self._node_of: dict[int, int] = {}
        self._next_node = 0
        self.on_forget: Callable[[PrefixNode], None] = lambda node: None
        """Is told first of each node whose page is given away."""
        self.on_give_away: Callable[[int, PrefixNode], None] = lambda page, node: None
        """The same, with the page, which still has its contents until it is written again."""
        self.on_snapshot: Callable[[int, PrefixNode], None] = lambda row, node: None
        """Is told of the row that keeps what layers have of a prefix besides pages, from the step under way on."""
        self.on_lose_snapshot: Callable[[int, PrefixNode, bool], None] = lambda row, node, is_of_use: None
        """Is told that it does no longer, and whether it is of use: the row holds it until the next step."""
        self.on_register: Callable[[int, PrefixNode, PrefixNode, Sequence[int]], None] = lambda *registered: None
        """Is told of each page that can be found by its prefix from now on: its node, its parent's and its tokens."""

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, those that still hold a reusable prefix included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that can be found by their prefix."""
        return len(self._page_of)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, forgetting the prefixes they held; None, and nothing changed, when too few are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            self._forget(page)
        return pages

    def chain(self, pages: Sequence[int]) -> list[PrefixNode]:
        """The nodes of pages that were found together: the prefixes that end with each of them."""
        return [self._node_of[page] for page in pages]

    def acquire_prefix(self, tokens: Sequence[int], root: PrefixNode = None) -> tuple[list[int], PrefixNode]:
        """Hold the pages of the longest cached prefix of `tokens`, in whole pages; also the node it ends in."""
        node = root
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages, node
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self._page_of.get((node, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1
            pages.append(page)
            node = self._node_of[page]
        return pages, node

    def register(self, page: int, parent: PrefixNode, tokens: Sequence[int]) -> PrefixNode:
        """Make a full page findable after `parent`; returns its node.

        If another page already holds the same prefix, that one stays the findable one, and its node is returned.
        """
        if not self.enable_prefix_caching:
            return parent
        key = (parent, tuple(tokens))
        known = self._page_of.get(key)
        if known is not None:
            return self._node_of[known]
        self._page_of[key] = page
        self._key_of[page] = key
        self._next_node += 1
        self._node_of[page] = self._next_node
        self.on_register(page, self._next_node, parent, tokens)
        return self._next_node

    def release(self, pages: Sequence[int]) -> None:
        """Let go of one sequence's pages, given in the sequence's order: its last page is the first to be reused."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)  # holds nothing reusable

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that the pool agrees with the page lists `held` by all sequences; for tests and idle checks."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._references, "reference counts do not match the pages held"
        free = set(self._free)
        assert free == {p for p in range(1, self.num_pages) if counts[p] == 0}, "free pages do not match"
        assert 0 not in free and counts[0] == 0, "page 0 was given away"
        assert {p: k for k, p in self._page_of.items()} == self._key_of, "prefix index is inconsistent"

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
            node = self._node_of.pop(page)
            self.on_forget(node)
            self.on_give_away(page, node)


@dataclass
class FoundPrefix:
    """Pages that have been acquired for a request, and what features know of its tokens.

    Attributes:
        root: where its prefixes begin.
        tokens: those that a prefix may have: before the first whose hidden state is needed.
        pages: those on the devices that hold the longest known prefix, as far as the request goes on from it.
        chain: the node of each page that was found on the devices.
        depth: pages that the request goes on after; there may be more than on the devices.
        known: pages that are known, although it cannot go on after them.
        at_depths: it can only go on where more than the pages before is known.
        returning: the contents of pages after those on the devices.
        snapshot: what layers keep of a sequence besides pages, after `depth` of them, where it comes from the host.
        snapshot_row: the row of the layers' buffers that takes this.
    """

    root: PrefixNode
    tokens: Sequence[int]
    pages: list[int] = field(default_factory=list)
    chain: list[PrefixNode] = field(default_factory=list)
    depth: int = 0
    known: int = 0
    at_depths: bool = False
    returning: list[Any] = field(default_factory=list)
    snapshot: Any = None
    snapshot_row: int = 0

    @property
    def node(self) -> PrefixNode:
        """The one that `pages` end in."""
        return self.chain[len(self.pages) - 1] if self.pages else self.root


def find_prefix(pool: PagePool, features: Features, request: Request, root: PrefixNode) -> FoundPrefix | None:
    """The longest prefix that the request can go on from, on the devices or where its features have kept it.

    None where the request had better wait for a step that is under way.
    """
    found = FoundPrefix(root, features.keys(request, 0, features.first_read(request)))
    if not found.tokens:
        return found
    found.pages, _ = pool.acquire_prefix(found.tokens, root)
    found.chain = pool.chain(found.pages)
    found.depth = found.known = len(found.pages)
    for feature, extra in features.of(request, Feature.extend):
        if not feature.extend(request, extra, found):
            pool.release(found.pages)
            return None
    pool.release(found.pages[found.depth :])
    found.pages = found.pages[: found.depth]
    return found
