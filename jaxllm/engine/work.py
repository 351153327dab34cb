"""One step's work, as the scheduler hands it to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.engine.offload.cache_rows import CacheRow
from jaxllm.engine.offload.host_pages import Page
from jaxllm.engine.offload.prefix_digests import Digest
from jaxllm.engine.request import Request

if TYPE_CHECKING:
    from jaxllm.engine.adapters.reading import Rows


@dataclass
class Chunk:
    """Tokens `start … start + length - 1` of one request; if `num_sampled` is not 0, its end chooses new tokens.

    A decode may choose several, one behind another: every one of them but the last is run as well. Where drafts are
    tried, `num_sampled` is the most it can be, and so is `start` as long as a step before has not been read.
    """

    request: Request
    start: int
    length: int
    num_sampled: int
    state_read: int = 0
    """The row of the state that it goes on from; 0 is its slot's."""
    state_kept: int = 0
    """The row that the state after its sequence's first `kept_tokens` tokens is kept in; 0 for none. A step that tries
    drafts keeps the one at the last page that it fills, if any."""
    kept_tokens: int = 0

    @property
    def captured_positions(self) -> list[int]:
        """Those of its tokens whose activations are wanted."""
        capture = self.request.capture
        if capture is None:
            return []
        return capture.among(range(self.start, self.start + self.length), self.request.num_prompt)

    @property
    def patches(self) -> list[int]:
        """Which of its request's patches are of tokens in it."""
        patching = self.request.patching
        return [] if patching is None else patching.among(range(self.start, self.start + self.length))


@dataclass
class Batch:
    """One step's work: chunks of one token come first, in the kernels' order."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    """Leading chunks of exactly one token."""
    admitted: list[Request] = field(default_factory=list)
    entering: list[tuple[Rows, int]] = field(default_factory=list)
    """Adapters that have to be on the devices for it and are not, and the place that each takes."""
    leaving: list[tuple[CacheRow, Digest]] = field(default_factory=list)
    """Pages and states that are to be copied to the host before anything else, and what they are called there."""
    returning: list[tuple[CacheRow, Page]] = field(default_factory=list)
    """Pages and states that are to be filled with what the host has kept, after that."""
    num_steps: int = 1
    """How many tokens a decode gives each request, one after another."""
    most_drafts: int = 0
    """How many tokens a decode may try ahead with a request: as many as its chunk may sample, less one."""
    unsettled: bool = False
    """Only the device knows where some of the requests are, whose drafts it is still to take or refuse."""
    masked: bool = False
    """The host has a say in some token that is sampled, once it has seen the one before: a grammar's, or a budget's."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def drafts(self) -> bool:
        """A decode runs as one that tries tokens ahead, though perhaps with none: the device goes by its own places."""
        return self.most_drafts > 0 or self.unsettled

    @property
    def verifies(self) -> bool:
        """One executable tries the drafts. With masks it needs to know which drafts there are: nothing is unsettled."""
        return self.decode_only and (self.drafts if not self.masked else self.most_drafts > 0)

    @property
    def decode_only(self) -> bool:
        """Every chunk is one token that samples and is not patched, and nothing else is read from its hidden states:
        one executable does it all.
        """
        return all(
            chunk.length == 1 and chunk.num_sampled and not chunk.request.reads_hidden and not chunk.patches
            for chunk in self.chunks
        )
