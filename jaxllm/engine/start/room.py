"""How an engine asks for its place in memory before it takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


def _at_once(nbytes: int | None) -> None:
    """Nobody has to make room."""


@dataclass(frozen=True)
class MemoryRoom:
    """What starts an engine beside others hands to it.

    Attributes:
        budget: bytes that it may plan with, of each device or of the host; None: as without others.
        ask: called once with the bytes that it will take, or None where only its devices could tell, before it touches
            those; returns when they are free, and raises what keeps it from starting.
    """

    budget: int | None = None
    ask: Callable[[int | None], None] = _at_once

    @property
    def taken(self) -> MemoryRoom:
        """The same place for another start of the same engine, which need not ask."""
        return replace(self, ask=_at_once)
