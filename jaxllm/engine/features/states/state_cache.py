"""Which cached prefixes can be gone on from in layers that keep a state: where the state after each of them is kept.

Host side only: a state is the number of a row in the layers' buffers, and a prefix is its node in the page pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.engine.core.pages import PrefixNode


class Found(NamedTuple):
    """The longest prefix with a state, in nodes of a chain, and the state's row; `awaited` says that a step which has
    been scheduled, and not yet run, keeps the state of a longer one."""

    depth: int
    row: int
    awaited: bool


@dataclass
class _Snapshot:
    row: int
    found: bool = False


class StateCache:
    """A budget of rows. A row is free, reserved for a state that a step is to keep, or holds the state of a prefix.

    When all are taken, the state that was least recently found or kept gives way. Steps run in the order in which they
    are scheduled: so a row may be given away as soon as the step that reads it has been scheduled, but one step writes
    no row twice, and none that it reads.
    """

    def __init__(self, first_row: int, num_rows: int):
        self.first_row = first_row
        self.num_rows = num_rows
        self._free = list(range(first_row + num_rows - 1, first_row - 1, -1))
        self._snapshots: OrderedDict[PrefixNode, _Snapshot] = OrderedDict()
        """The least recently used first."""
        self._awaited: set[PrefixNode] = set()
        self._written: set[int] = set()
        """Rows that were reserved for the step that is being scheduled."""
        self._read: set[int] = set()
        """Rows that it reads."""
        self._free_later: list[int] = []
        """Those of them that are free as soon as the next one is."""
        self.on_keep: Callable[[int, PrefixNode], None] = lambda row, node: None
        """Is told of each state that is kept, which its row has once the step under way has run."""
        self.on_forget: Callable[[int, PrefixNode, bool], None] = lambda row, node, is_of_use: None
        """Is told of each that is kept no longer, and whether it is of use: its row holds it until the next step."""

    @property
    def num_kept(self) -> int:
        """Prefixes whose state is kept."""
        return len(self._snapshots)

    def begin_step(self) -> None:
        """What earlier steps keep can be read by the one that is scheduled now."""
        self._awaited.clear()
        self._written.clear()
        self._read.clear()
        self._free += self._free_later
        self._free_later = []

    def reserve(self) -> int:
        """A row for a state that a step is to keep; 0 where every row is reserved, awaited or read."""
        if not self._free:
            spared = (node for node, found in self._snapshots.items() if found.row not in self._read)
            oldest = next((node for node in spared if node not in self._awaited), None)
            if oldest is None:
                return 0
            self.forget(oldest)
        if not self._free:
            return 0
        row = self._free.pop()
        self._written.add(row)
        return row

    def release(self, row: int) -> None:
        """Nothing will be found in a reserved row."""
        (self._free_later if row in self._written | self._read else self._free).append(row)

    def keep(self, node: PrefixNode, row: int) -> bool:
        """A reserved row will hold the state after the prefix `node`; False, and the row is free, if another does."""
        if node in self._snapshots:
            self._snapshots.move_to_end(node)
            self.release(row)
            return False
        self._snapshots[node] = _Snapshot(row)
        self._awaited.add(node)
        self.on_keep(row, node)
        return True

    def find(self, chain: Sequence[PrefixNode]) -> Found:
        """The last node of a chain of prefixes, each one page longer than the one before, whose state can be read."""
        awaited = False
        for depth in range(len(chain), 0, -1):
            node = chain[depth - 1]
            if node in self._awaited:
                awaited = True
            elif node in self._snapshots:
                return Found(depth, self._snapshots[node].row, awaited)
        return Found(0, 0, awaited)

    def use(self, node: PrefixNode) -> None:
        """A request goes on from this state."""
        self._snapshots[node].found = True
        self._read.add(self._snapshots[node].row)
        self._snapshots.move_to_end(node)

    def discard(self, node: PrefixNode) -> None:
        """Forget a state that a longer prefix of the same request has outdone, unless some request went on from it."""
        snapshot = self._snapshots.get(node)
        if snapshot is not None and not snapshot.found:
            self._forget(node, is_of_use=False)

    def forget(self, node: PrefixNode) -> None:
        """The pages of a prefix are given away: its state is of no more use here."""
        if node in self._snapshots:
            self._forget(node, is_of_use=True)

    def _forget(self, node: PrefixNode, *, is_of_use: bool) -> None:
        row = self._snapshots.pop(node).row
        self._awaited.discard(node)
        self.on_forget(row, node, is_of_use and row not in self._written)
        self.release(row)

    def check(self, reserved: Sequence[int]) -> None:
        """Assert that every row is free, in use once, or among those `reserved` by requests."""
        rows = [*self._free, *self._free_later, *reserved, *(snapshot.row for snapshot in self._snapshots.values())]
        assert sorted(rows) == list(range(self.first_row, self.first_row + self.num_rows)), "a row of states was lost"
        assert self._awaited <= set(self._snapshots), "a state is awaited that nobody keeps"
