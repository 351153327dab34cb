"""What a request begins with: as much of its tokens as is known, and as it can go on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from jaxllm.engine.offload.host_pages import Page
from jaxllm.engine.offload.tiers import PageTiers, Returning
from jaxllm.engine.page_pool import PagePool, PrefixNode
from jaxllm.engine.request import Request
from jaxllm.engine.state_cache import StateCache


@dataclass
class FoundPrefix:
    """Pages that have been acquired for a request, the node they end in, and what comes back from the host."""

    pages: list[int]
    node: PrefixNode
    num_on_device: int
    """Pages that the request could have gone on from without the host."""
    returning: list[Page] = field(default_factory=list)
    """The pages behind `pages` that the host has."""
    state_row: int = 0
    """Where the state after all these pages is on the devices; 0 for nowhere."""
    state: Page | None = None
    """That state, where the host has it."""
    branches_at: int = 0
    """Where the request parts from others although no state is kept there: tokens; 0 for nowhere."""

    @property
    def num_pages(self) -> int:
        """Pages that it begins with."""
        return len(self.pages) + len(self.returning)


class PrefixSearch:
    """Looks on the devices first, then in host memory."""

    def __init__(self, pool: PagePool, states: StateCache | None, tiers: PageTiers | None, spared: int):
        """So many free pages are `spared` where layers keep no states: they are not filled with what the host has."""
        self._pool = pool
        self._states = states
        self._tiers = tiers
        self._spared = spared

    def find(self, request: Request, root: PrefixNode) -> FoundPrefix | None:
        """The longest prefix among the tokens before the first whose hidden state is needed: the last, or an earlier.

        None where the request had better wait for a step that is under way.
        """
        usable = list(islice(request.token_ids, request.first_read))
        if not usable:
            return FoundPrefix([], root, 0)
        pages, node = self._pool.acquire_prefix(usable, root)
        if self._states is not None:
            return self._with_state(usable, pages, root, self._states)
        found = FoundPrefix(pages, node, len(pages))
        if self._tiers is not None:
            size, room = self._pool.page_size, max(self._pool.num_free - self._spared, 0)
            found.returning = self._tiers.find(node, usable[len(pages) * size : (len(pages) + room) * size])
        return found

    def _with_state(
        self, usable: list[int], pages: list[int], root: PrefixNode, states: StateCache
    ) -> FoundPrefix | None:
        """As many of the pages as lead to a state, the longest that there is one for, on the devices or in the host.

        Where more pages are known, other requests begin as this one does: the state is kept there too when it comes by.

        A part of the pages would be of no use, so that a request waits until there is room for all that come back.
        """
        size, chain = self._pool.page_size, self._pool.chain(pages)
        kept = states.find(chain)
        if kept.awaited:
            self._pool.release(pages)
            return None
        back = Returning([])
        if self._tiers is not None:
            back = self._tiers.find_state(root, chain, usable[len(pages) * size :], kept.depth)
        if back.awaited:
            self._pool.release(pages)
            return None
        depth = max(kept.depth, back.depth)
        self._pool.release(pages[depth:])
        pages, known = pages[:depth], max(len(pages), back.known)
        node = chain[len(pages) - 1] if pages else root
        branches_at = known * size if known > depth else 0
        found = FoundPrefix(pages, node, kept.depth, back.pages, branches_at=branches_at)
        if back.state is not None:
            found.state = back.state
        elif depth:
            states.use(node)
            found.state_row = kept.row
        return found
