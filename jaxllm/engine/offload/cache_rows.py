"""Pages and states by their places on the devices."""

from __future__ import annotations

from typing import Literal, NamedTuple

RowKind = Literal["page", "state"]
ROW_KINDS: tuple[RowKind, RowKind] = ("page", "state")


class CacheRow(NamedTuple):
    """A row of the layers' buffers: a page, or the state of one sequence or prefix."""

    kind: RowKind
    number: int
