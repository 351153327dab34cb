"""Drafts of a smaller model, which reads and writes pages of its own through the same page table.

The device knows for each slot how many of its tokens the draft model has run (`drafted`). It runs a prompt beside
the model, in the same step. Where decodes have gone on without it, and where all of its drafts were right, it runs what
it lacks at the beginning of the next step that wants drafts. So nothing but the drafts depends on how far it has come.

It samples as the model would: with the request's own temperature, penalties and filters, and with the random number of
the position. Two models that nearly agree then mostly choose the same token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.engine.core.batch import decode_batch, forward, mixed_batch
from jaxllm.engine.core.feature import RanModel, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.sampler import choose
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.drafts.drafter import Asked, with_own
from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.pallas_kernels import Kernels, StepMetadata
from jaxllm.weights.loader import ParamSpec

MOST_ROUNDS = 8
"""In one step the draft model runs at most so many times as many tokens as it lacks after a step with drafts."""


class AbstractDraft(NamedTuple):
    """A draft model without its memory, and its parameters in the order of `nnx.split`'s leaves."""

    model: Decoder
    params: list[ParamSpec]


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts up to `num_tokens` tokens with `model`, whose caches come behind the `num_own` of the model it serves."""

    model: Callable[[], Decoder]
    num_tokens: int
    num_own: int
    vocab_size: int
    page_size: int

    follows_decodes = False
    reads = ()

    def follow(self, step: RanModel, caches: tuple[Cache, ...], before: Slots, slots: Slots) -> Any:
        """Caches and slots after a step with prompts in it, which the draft model runs as well.

        Where the draft model is behind, it stays so.
        """
        _, caches = self._run(step.tokens, caches, step.meta)
        earlier = before.of["drafts"]["drafted"]
        return caches, with_own(slots, drafted=jnp.where(earlier >= before.position, slots.position, earlier))

    def propose(
        self, caches: tuple[Cache, ...], slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]
    ) -> Any:
        """Caches, slots, drafts [S, K], and how many there are for each sequence."""
        rows = asked.slot.shape[0]

        def nothing(caches: tuple[Cache, ...], slots: Slots) -> Any:
            return caches, slots, jnp.zeros((rows, self.num_tokens), jnp.int32), jnp.zeros(rows, jnp.int32)

        def some(caches: tuple[Cache, ...], slots: Slots) -> Any:
            caches, slots, hidden = self._catch_up(caches, slots, asked)
            ready = asked.live & (slots.of["drafts"]["drafted"][asked.slot] == asked.position + 1)
            found = asked._replace(most=jnp.where(ready, asked.most, 0))
            return *self._draft(caches, slots, found, hidden, variant, hands), found.most

        return lax.cond(jnp.any(asked.most > 0), some, nothing, caches, slots)

    def _catch_up(
        self, caches: tuple[Cache, ...], slots: Slots, asked: Asked
    ) -> tuple[tuple[Cache, ...], Slots, jax.Array]:
        """Run what the draft model lacks up to each sequence's last token: caches, slots, and its hidden states there.

        Every sequence runs one token at least, so that those with nothing to catch up have hidden states as well.
        """
        rows, chunk = asked.slot.shape[0], self.num_tokens + 1
        none = jnp.zeros((0, 3), jnp.int32)

        def one_round(carry: Any) -> Any:
            index, caches, slots, _ = carry
            begin = jnp.where(asked.live, jnp.minimum(slots.of["drafts"]["drafted"][asked.slot], asked.position), 0)
            count = jnp.where(asked.live, jnp.minimum(asked.position + 1 - begin, chunk), 0)
            start = jnp.cumulative_sum(count, include_initial=True).astype(jnp.int32)
            fields = {"slot": asked.slot, "num_seqs": asked.num_seqs, "tokens": jnp.full(rows * chunk, -1)}
            fields |= {"query_start": start, "num_decodes": jnp.int32(0), "new_pages": none}
            at = slots.position.at[asked.slot].set(begin)
            tokens, meta, after = mixed_batch(fields, slots._replace(position=at))
            hidden, caches = self._run(tokens, caches, meta)
            drafted = slots.of["drafts"]["drafted"].at[asked.slot].set(begin + count)
            last = hidden[jnp.maximum(start[1:] - 1, 0)].astype(jnp.float32)
            return index + 1, caches, with_own(after._replace(position=slots.position), drafted=drafted), last

        def goes_on(carry: Any) -> Any:
            index, _, slots, _ = carry
            behind = asked.live & (slots.of["drafts"]["drafted"][asked.slot] <= asked.position)
            return (index == 0) | (jnp.any(behind) & (index < MOST_ROUNDS))

        hidden = jnp.zeros((rows, self.model().config.hidden_size), jnp.float32)
        _, caches, slots, hidden = lax.while_loop(goes_on, one_round, (jnp.int32(0), caches, slots, hidden))
        return caches, slots, hidden

    def _draft(
        self,
        caches: tuple[Cache, ...],
        slots: Slots,
        asked: Asked,
        hidden: jax.Array,
        variant: Variant,
        hands: Sequence[Traced],
    ) -> Any:
        """Caches, slots and drafts: the first follows the last token's hidden states, each further one a decode."""
        rows, nobody = asked.slot.shape[0], slots.position.shape[0] - 1
        position = slots.position
        drafts = jnp.zeros((rows, self.num_tokens), jnp.int32)

        def sample(slots: Slots, slot: jax.Array, hidden: jax.Array, at: jax.Array) -> tuple[Slots, jax.Array]:
            scored = _Scores(self.model(), self.vocab_size)
            slots, sampled = choose(scored, hidden, {"slot": slot, "position": at}, slots, variant, hands)
            return slots, sampled.tokens

        def further(index: jax.Array, carry: Any) -> Any:
            caches, slots, drafts = carry
            slot = jnp.where(index < asked.most, asked.slot, nobody)
            at = jnp.where(slot == nobody, 0, asked.position + index)
            fields = {"num_decodes": asked.num_seqs, "tokens": drafts[:, index - 1], "slot": slot}
            fields |= {"new_page": jnp.zeros_like(slot)}
            tokens, meta, _ = decode_batch(fields, slots._replace(position=position.at[slot].set(at)), self.page_size)
            hidden, caches = self._run(tokens, caches, meta)
            slots, found = sample(slots, slot, hidden, at)
            return caches, slots, drafts.at[:, index].set(found)

        slots, first = sample(slots, jnp.where(asked.most > 0, asked.slot, nobody), hidden, asked.position)
        carry = caches, slots, drafts.at[:, 0].set(first)
        caches, slots, drafts = lax.fori_loop(1, jnp.max(asked.most), further, carry)
        run = slots.of["drafts"]["drafted"].at[asked.slot].add(jnp.maximum(asked.most - 1, 0))
        return caches, with_own(slots, drafted=run), drafts

    def _run(
        self, tokens: jax.Array, caches: tuple[Cache, ...], meta: StepMetadata
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """The draft model itself, without adapters: those are the model's that it serves."""
        return forward(self.model(), tokens, caches, replace(meta, adapter_scales=None), first=self.num_own)


class _Scores:
    """A draft model's head, for the tokens of the model that it serves: their vocabularies may differ in padding."""

    def __init__(self, model: Decoder, vocab_size: int):
        self._model = model
        self._vocab_size = vocab_size

    @property
    def kernels(self) -> Kernels:
        return self._model.kernels

    def most_likely(self, hidden: jax.Array) -> jax.Array | None:
        """As `Decoder.most_likely`."""
        return self._model.most_likely(hidden) if self._model.config.num_outputs <= self._vocab_size else None

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Decoder.logits`; tokens that the draft model lacks are impossible."""
        found = self._model.logits(hidden)[:, : self._vocab_size]
        missing = self._vocab_size - found.shape[1]
        return jnp.pad(found, ((0, 0), (0, missing)), constant_values=-jnp.inf)
