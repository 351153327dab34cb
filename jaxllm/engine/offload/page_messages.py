"""What two servers of a model say to each other about pages."""

from __future__ import annotations

import msgspec

from jaxllm.engine.offload.prefix_digests import Digest

MOST_DIGESTS = 2**14
"""Of one question: their header stays well below what a frame may have."""


class PagesWanted(msgspec.Struct, tag=True):
    """The pages of these prefixes are wanted, by an engine whose pages hold what `contents` is a digest of."""

    contents: str
    digests: list[Digest]


class SomePages(msgspec.Struct, tag=True):
    """Comes with the next pages in their order: uint8 `[pages, page_bytes]`."""


class AllGiven(msgspec.Struct, tag=True):
    """There are no more of them."""


class NoPages(msgspec.Struct, tag=True):
    """No page is given, for this reason."""

    reason: str


FromGiver = SomePages | AllGiven | NoPages
