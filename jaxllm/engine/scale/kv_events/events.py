"""Events of a prefix cache, in vLLM's format: which pages of prompts can be found, and which no longer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.pages import PagePool, PrefixNode

MEDIUM = "GPU"
"""vLLM's word for memory of the devices, whichever they are."""


class BlockStored(msgspec.Struct):
    """Pages, one after the other, that can be found by their tokens from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """What comes before the first of them; None at the beginning of prompts."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct):
    """Pages that cannot be found any more."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct):
    """No page that was stored before can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def as_map(event: KVEvent) -> dict[str, Any]:
    """As vLLM writes events since 0.26."""
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


def as_array(event: KVEvent) -> list[Any]:
    """As vLLM wrote them before."""
    return [type(event).__name__, *msgspec.structs.astuple(event)]


class KVEvents(Feature):
    """Gathers what becomes of the pages of a pool, and hands it to `publish` once a step.

    A page is known by a hash of all tokens up to its end, which is the same in every engine. Prompts with a
    `cache_salt`, an adapter or steering are nobody else's, and nothing is told of them.
    """

    name = "kv_events"

    def __init__(self, pool: PagePool, publish: Callable[[list[KVEvent]], None], close: Callable[[], None]):
        self._close = close
        self._publish = publish
        self._page_size = pool.page_size
        self._root: PrefixNode = None
        self._hashes: dict[PrefixNode, int] = {}
        """Of the pages that others know of, by their nodes."""
        self._events: list[KVEvent] = []
        registered, given_away = pool.on_register, pool.on_give_away

        def on_register(page: int, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> None:
            registered(page, node, parent, tokens)
            self._stored(node, parent, tokens)

        def on_give_away(page: int, node: PrefixNode) -> None:
            given_away(page, node)
            self._removed(node)

        pool.on_register, pool.on_give_away = on_register, on_give_away

    def reset(self, root: PrefixNode) -> None:
        """Nothing that was stored so far is found any more; what others may know of begins with `root` from now on."""
        self._root = root
        self._hashes.clear()
        self._events.append(AllBlocksCleared())
        self.turned()

    def close(self) -> None:
        """Tell others no more."""
        self._close()

    def turned(self) -> None:
        """Publish what has happened since the last call."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _stored(self, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> None:
        if parent != self._root and parent not in self._hashes:
            return
        before = self._hashes.get(parent)
        own = self._hashes[node] = hash_of(before, tokens)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == before:
            last.block_hashes.append(own)
            last.token_ids += tokens
        else:
            self._events.append(BlockStored([own], before, list(tokens), self._page_size))

    def _removed(self, node: PrefixNode) -> None:
        own = self._hashes.pop(node, None)
        if own is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(own)
        else:
            self._events.append(BlockRemoved([own]))


def hash_of(before: int | None, tokens: Sequence[int]) -> int:
    """Of a page's tokens and all before them: 64 bits."""
    start = b"" if before is None else before.to_bytes(8, "big")
    content = start + array("q", tokens).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
