"""What prefixes are called outside of one page pool: by a digest of all their tokens."""

from __future__ import annotations

import array
import hashlib
import secrets
from collections.abc import Sequence

from jaxllm.engine.page_pool import PrefixNode

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
