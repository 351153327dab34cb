"""One step's work, as the scheduler hands it to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.core.request import Request


@dataclass
class Chunk:
    """Tokens `start … start + length - 1` of one request; if `num_sampled` is not 0, its end chooses new tokens.

    A decode may choose several, one after another: every one of them but the last is run as well. Where tokens are
    tried ahead, `num_sampled` is the most it can be, and so is `start` as long as a step before has not been read.
    """

    request: Request
    start: int
    length: int
    num_sampled: int
    apart: bool = False
    """More is done with its tokens than choosing the next one: they need a backbone by itself."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What features know of it, by their names."""


@dataclass
class Batch:
    """One step's work: chunks of one token come first, in the kernels' order."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    """Leading chunks of exactly one token."""
    admitted: list[Request] = field(default_factory=list)
    """Each takes its slot with the first of its chunks."""
    num_steps: int = 1
    """How many tokens a decode gives each request, one after another."""
    most_ahead: int = 0
    """How many tokens a decode may try ahead with a request: as many as its chunk may sample, less one."""
    unsettled: bool = False
    """Only the device knows where some of the requests are: it is still to take or refuse what was tried with them."""
    late: bool = False
    """The host has a say in some token that is sampled, once it has seen the one before."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def tries(self) -> bool:
        """A decode runs as one that tries tokens ahead, though perhaps with none: the device goes by its own places."""
        return self.most_ahead > 0 or self.unsettled

    @property
    def verifies(self) -> bool:
        """One executable tries them. Where the host has a say it knows which there are: nothing is unsettled."""
        return self.decode_only and (self.tries if not self.late else self.most_ahead > 0)

    @property
    def decode_only(self) -> bool:
        """Every chunk is one token that samples, and no more is done with it: one executable does it all."""
        return all(chunk.length == 1 and chunk.num_sampled and not chunk.apart for chunk in self.chunks)
