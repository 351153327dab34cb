"""What a step has run, for those who want to know where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxllm.engine.device.keys import Key
from jaxllm.engine.work import Batch

StepKind = Literal["decode", "prefill"]
"""A decode gives each of its requests tokens; a prefill computes some prompt, perhaps beside others' decodes."""


class RanExecutable(NamedTuple):
    """An executable that a step has run."""

    key: Key
    used: int | None = None
    """Rows or tokens of its bucket that are some request's; None where they are not counted."""
    times: int = 1
    """How often it runs the model, one token after the other."""


class RanSequence(NamedTuple):
    """A request's part of a step."""

    length: int
    """Tokens that are computed."""
    context: int
    """Tokens that its attention may see at the end, these among them."""


@dataclass
class RanStep:
    """One step: what it ran, for whom, and how long it took."""

    kind: StepKind
    executables: Sequence[RanExecutable]
    lengths: Sequence[int]
    """Tokens of each request that are computed."""
    contexts: Sequence[int]
    """Of each request's tokens, those that its attention may see at the end."""
    dispatched: float
    """When it had been enqueued, on `time.perf_counter`'s clock."""
    seconds: float | None = None
    """From when the one before it had been read, or it was enqueued if that was later, until its results were on the
    host.
    """
    waited: bool = True
    """Whether the host waited for it; otherwise it had ended some time before its results were looked at."""

    @classmethod
    def of(cls, batch: Batch, executables: Sequence[RanExecutable], dispatched: float) -> RanStep:
        """A step that has just been enqueued, noted in as little time as can be: every step is.

        Of drafts that are still under way only the device knows; those count that are known.
        """
        kind: StepKind = "decode" if batch.decode_only else "prefill"
        lengths = [chunk.length for chunk in batch.chunks]
        contexts = [min(chunk.start + chunk.length, len(chunk.request.token_ids) + 1) for chunk in batch.chunks]
        return cls(kind, executables, lengths, contexts, dispatched)

    @property
    def sequences(self) -> list[RanSequence]:
        """Each request's part of it."""
        return list(map(RanSequence, self.lengths, self.contexts))
