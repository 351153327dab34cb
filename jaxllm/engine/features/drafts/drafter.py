"""What a step that tries tokens ahead wants to know of wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Int

from jaxllm.engine.core.feature import RanModel, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.slots import Slots


def with_own(slots: Slots, **rows: Array) -> Slots:
    """Slots with other rows of what drafts keep there."""
    return slots._replace(of=slots.of | {"drafts": slots.of["drafts"] | rows})


class Asked(NamedTuple):
    """The sequences that drafts are wanted for, `num_seqs` of `S`; those that are not `live` are padding, with its
    slot.
    """

    slot: Int[Array, "S"]
    position: Int[Array, "S"]
    """Of each sequence's last token, which is in its slot's history."""
    most: Int[Array, "S"]
    """How many drafts may be tried, 0 for none."""
    live: Bool[Array, "S"]
    num_seqs: Int[Array, ""]


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts. `num_tokens` is `K`, the most that it gives."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def follows_decodes(self) -> bool:
        """Whether it is told of decodes as well, and not of prompts alone."""

    @property
    def reads(self) -> tuple[int, ...]:
        """In front of which of the model's layers the states are that it reads; none are the last hidden states."""

    def follow(self, step: RanModel, caches: Any, before: Slots, slots: Slots) -> Any:
        """(caches, slots) after a step that has run prompts: what the source keeps of them is in.

        `slots` are as that step leaves them, and were `before`.
        """

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]) -> Any:
        """(caches, slots, drafts [S, K], how many of them there are for each sequence)."""
