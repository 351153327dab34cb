"""How a model marks its reasoning, as far as ending it needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ThinkingMarkers:
    """The texts around a reasoning block.

    Attributes:
        open: what begins it: an answer that does not begin with this text has none.
        close: what ends it.
        behind: what the model writes right behind `close`, such as the lines that set the answer apart.
        opened: the prompt ends inside the block, so the answer begins there.
    """

    open: str
    close: str
    behind: str = ""
    opened: bool = False
