"""What a request begins with: as much of its tokens as is known, and as it can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.pages import PagePool, PrefixNode
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request


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
    found = FoundPrefix(root, list(islice(request.token_ids, features.first_read(request))))
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
