"""A router's view of a prefix cache, from its events alone."""

from __future__ import annotations

from typing import Any


class Subscriber:
    """Knows each stored page by its hash: the hash before it, and its tokens."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def hear(self, event: dict[str, Any]) -> None:
        """An event by names."""
        match event["type"]:
            case "BlockStored":
                size, before = event["block_size"], event["parent_block_hash"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                assert before is None or before in self.pages, "what comes before is known"
                for at, own in enumerate(event["block_hashes"]):
                    assert own not in self.pages
                    self.pages[own] = before, tuple(event["token_ids"][at * size : (at + 1) * size])
                    before = own
            case "BlockRemoved":
                for own in event["block_hashes"]:
                    del self.pages[own]
            case "AllBlocksCleared":
                self.pages.clear()
            case other:
                raise AssertionError(other)

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        """The beginnings of prompts that are cached up to their last page, as far as what comes before is."""
        found = set()
        for own in self.pages:
            tokens, at = (), own
            while at is not None and at in self.pages:
                before, part = self.pages[at]
                tokens, at = part + tokens, before
            if at is None:
                found.add(tokens)
        return found
