"""States that scheduled steps keep of one request, and after how many of its tokens that is.

Where drafts are tried only the device knows where a step begins and ends. It keeps the state at the last full page that
the step fills, if it fills any; since a step with drafts has at most as many tokens as a page, there is no other. So
the host knows which state that was as soon as it knows how many drafts were taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class _Reserved:
    """The row that one step keeps a state in."""

    row: int
    tokens: int = 0
    """The state is the one after so many tokens; 0 where that is not known yet."""
    start: int = 0
    """Where the step begins at most; exactly, once nothing is `unsettled`."""
    tried: int = 0
    """How many drafts it tries."""
    unsettled: int = 0
    """How many drafts of steps before it are still to be taken or refused."""

    def find_page(self, page_size: int) -> bool:
        """Whether a state may be kept, as far as is known; `tokens` are set where it is kept for certain."""
        if self.unsettled or self.tokens:
            return True
        if (self.start + 1) % page_size == 0:
            self.tokens = self.start + 1
        return (self.start + 1 + self.tried) // page_size * page_size > self.start


class ReservedStates:
    """The rows in the order of their steps."""

    def __init__(self) -> None:
        self._steps: deque[_Reserved] = deque()

    @property
    def rows(self) -> list[int]:
        """All rows that a state is, or may be, kept in."""
        return [step.row for step in self._steps]

    def add(self, row: int, tokens: int) -> None:
        """A step keeps the state after `tokens` tokens."""
        self._steps.append(_Reserved(row, tokens))

    def add_uncertain(self, row: int, start: int, tried: int, unsettled: int, page_size: int) -> None:
        """A step may keep a state: it begins at `start` less those of `unsettled` drafts that are refused."""
        step = _Reserved(row, start=start, tried=tried, unsettled=unsettled)
        step.find_page(page_size)
        self._steps.append(step)

    def settle(self, begin: int, num_tried: int, num_taken: int, page_size: int) -> list[int]:
        """The step that began at token `begin` has taken so many of its drafts. Returns rows that stay unused."""
        unused = []
        for step in [step for step in self._steps if not step.tokens]:
            if not step.unsettled and step.start == begin:
                kept = (begin + 1 + num_taken) // page_size * page_size
                step.tokens = kept if kept > begin else 0
                keeps = step.tokens > 0
            else:
                step.start -= num_tried - num_taken
                step.unsettled -= num_tried
                keeps = step.find_page(page_size)
            if not keeps:
                self._steps.remove(step)
                unused.append(step.row)
        return unused

    def take(self, tokens: int) -> int:
        """The row of the state after `tokens` tokens, which is no longer reserved; 0 where no step keeps it."""
        if not self._steps or self._steps[0].tokens != tokens:
            return 0
        return self._steps.popleft().row

    def clear(self) -> None:
        """Nothing is reserved any more."""
        self._steps.clear()
