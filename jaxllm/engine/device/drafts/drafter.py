"""What a step that tries tokens ahead wants to know of wherever they come from."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Int

from jaxllm.engine.device.keys import Variant
from jaxllm.engine.device.slots import Slots
from jaxllm.pallas_kernels import StepMetadata


class Asked(NamedTuple):
    """The sequences that drafts are wanted for, `num_seqs` of `S`; those that are not `live` are padding, whose slot is
    nobody's.
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

    def follow(self, tokens: jax.Array, meta: StepMetadata, caches: Any, before: Slots, slots: Slots) -> Any:
        """(caches, slots) after a step that has run prompts: what the source keeps of them is in."""

    def propose(self, caches: Any, slots: Slots, asked: Asked, variant: Variant) -> Any:
        """(caches, slots, drafts [S, K], how many of them there are for each sequence)."""
