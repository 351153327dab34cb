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
from jaxtyping import Array, Bool

from jaxllm.engine.core.batch import decode_batch, forward, mixed_batch
from jaxllm.engine.core.feature import RanModel, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.sampler import choose
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.drafts.verify import Asked, Drafter, with_own
from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.models.predictor import Predicted, Predictor
from jaxllm.pallas_kernels import Kernels, StepMetadata
from jaxllm.weights.loader import ParamSpec

MOST_ROUNDS = 8
"""The most times that the draft model runs in one step to catch up, each for as many tokens as a step with drafts."""


class AbstractDraft(NamedTuple):
    """A draft model without its memory, and its parameters in the order of `nnx.split`'s leaves."""

    model: Decoder
    params: list[ParamSpec]


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts up to `num_tokens` tokens with `model`, whose caches come after the `num_own` of the model it serves."""

    model: Callable[[], Decoder]
    num_tokens: int
    num_own: int
    vocab_size: int
    page_size: int

    def follow(self, step: RanModel, caches: tuple[Cache, ...], before: Slots, slots: Slots) -> Any:
        """The draft model runs prompts as well; where it is behind, it stays so."""
        _, caches = self._run(step.tokens, caches, step.meta)
        earlier = before.of["drafts"]["drafted"]
        return caches, with_own(slots, drafted=jnp.where(earlier >= before.position, slots.position, earlier))

    def propose(
        self, caches: tuple[Cache, ...], slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]
    ) -> Any:
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
        return self._model.most_likely(hidden) if self._model.config.num_outputs <= self._vocab_size else None

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Decoder.logits`; tokens that the draft model lacks are impossible."""
        found = self._model.logits(hidden)[:, : self._vocab_size]
        missing = self._vocab_size - found.shape[1]
        return jnp.pad(found, ((0, 0), (0, missing)), constant_values=-jnp.inf)


LayerCaches = tuple[Cache, ...]


@dataclass(frozen=True)
class ModuleDrafter(Drafter):
    """Drafts up to `num_tokens` tokens with `module`, whose caches come after the `num_own` of `model`."""

    module: Callable[[], Predictor]
    model: Callable[[], Decoder]
    num_tokens: int
    num_own: int
    page_size: int
    reads: tuple[int, ...] = ()

    follows_decodes = True

    def follow(self, step: RanModel, caches: LayerCaches, before: Slots, slots: Slots) -> tuple[LayerCaches, Slots]:
        """Caches and slots after a step, whose tokens the module runs with the states of those before them."""
        tokens, states, meta = step
        hidden = self.module().read(states)
        assert meta.slots is not None, "an engine's steps have slots"
        nobody = slots.position.shape[0] - 1
        begin = meta.context_len - jnp.diff(meta.query_start)
        live = jnp.arange(len(meta.slots)) < meta.num_seqs
        waits = live & (begin > 0) & (before.of["drafts"]["hidden_after"][meta.slots] == begin)
        last = meta.query_start[:-1]
        earlier = jnp.roll(hidden.astype(jnp.float32), 1, axis=0)
        at = jnp.where(waits, last, len(tokens))
        earlier = earlier.at[at].set(before.of["drafts"]["hidden"][meta.slots], mode="drop")
        behind, rows = (_one_each if meta.decode_only else _ragged)(meta, waits)
        caches = self._run(tokens[rows], earlier[rows], caches, behind).caches
        ends = jnp.clip(meta.query_start[1:] - 1, 0, len(tokens) - 1)
        own = jnp.where(live, meta.slots, nobody)
        states = slots.of["drafts"]["hidden"].at[own].set(hidden[ends].astype(jnp.float32))
        after = slots.of["drafts"]["hidden_after"].at[own].set(jnp.where(live, meta.context_len, 0))
        return caches, with_own(slots, hidden=states, hidden_after=after)

    def propose(
        self, caches: LayerCaches, slots: Slots, asked: Asked, variant: Variant, hands: Sequence[Traced]
    ) -> Any:
        rows, nobody = asked.slot.shape[0], slots.position.shape[0] - 1
        known = (asked.position > 0) & (slots.of["drafts"]["hidden_after"][asked.slot] == asked.position)
        most = jnp.where(known & asked.live, asked.most, 0)

        def one(index: jax.Array, carry: Any) -> Any:
            caches, slots, drafts, token, hidden = carry
            slot = jnp.where(index < most, asked.slot, nobody)
            at = jnp.where(slot == nobody, 0, asked.position - 1 + index)
            fields = {"num_decodes": asked.num_seqs, "tokens": token, "slot": slot, "new_page": jnp.zeros_like(slot)}
            there = slots._replace(position=slots.position.at[slot].set(at))
            _, meta, _ = decode_batch(fields, there, self.page_size)
            found = self._run(token, hidden, caches, meta)
            sampled_at = jnp.where(slot == nobody, 0, asked.position + index)
            fields = {"slot": slot, "position": sampled_at}
            slots, sampled = choose(head, found.hidden, fields, slots, variant, hands)
            drafts = drafts.at[:, index].set(sampled.tokens)
            return found.caches, slots, drafts, sampled.tokens, found.state.astype(jnp.float32)

        head = self.module().head_for(self.model())
        first = slots.history[asked.slot, asked.position], slots.of["drafts"]["hidden"][asked.slot]
        carry = caches, slots, jnp.zeros((rows, self.num_tokens), jnp.int32), *first
        caches, slots, drafts, *_ = lax.fori_loop(0, jnp.max(most), one, carry)
        return caches, slots, drafts, most

    def _run(self, tokens: jax.Array, hidden: jax.Array, caches: LayerCaches, meta: StepMetadata) -> Predicted:
        """The module over tokens and the states of those before them, at whose positions it is; with all caches."""
        module = self.module()
        meta = replace(meta, states=None, adapter_scales=None)
        found = module.predict(module.embed_for(self.model(), tokens), hidden, caches[self.num_own :], meta)
        return found._replace(caches=(*caches[: self.num_own], *found.caches))


def _one_each(meta: StepMetadata, waits: Bool[Array, "S"]) -> tuple[StepMetadata, Any]:
    """A step of decodes one token back. A row for which no state waits reads and writes the page that is nobody's."""
    at = jnp.where(waits, meta.positions - 1, 0)
    table = jnp.where(waits[:, None], meta.page_table, 0)
    rotary = jnp.maximum(meta.rotary_lengths, 1)
    found = replace(meta, positions=at, context_len=jnp.where(meta.live, at + 1, 0), page_table=table)
    return replace(found, rotary_lengths=rotary), jnp.arange(len(at))


def _ragged(meta: StepMetadata, waits: Bool[Array, "S"]) -> tuple[StepMetadata, Any]:
    """A step one token back, and which of its rows are in it: a sequence for which no state waits begins one later.

    Worked example: a sequence runs tokens 4 and 5, and one that begins 0, 1 and 2.

        positions    [4, 5, 0, 1, 2, 0, 0, 0]       becomes  [3, 4, 0, 1, 0, 0, 0, 0]
        query_start  [0, 2, 5]                               [0, 2, 4]
        rows                                                 [0, 1, 3, 4, …]
    """
    count, seqs = len(meta.seq_ids), len(waits)
    length = jnp.diff(meta.query_start)
    begin = meta.context_len - length
    left_out = jnp.where((length > 0) & ~waits, 1, 0)
    start = jnp.cumulative_sum(length - left_out, include_initial=True).astype(jnp.int32)
    token = jnp.arange(count)
    seq_ids = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq_ids, seqs - 1)
    place = token - start[seq] + left_out[seq]
    live = seq_ids < seqs
    rows = jnp.where(live, jnp.minimum(meta.query_start[seq] + place, count - 1), count - 1)
    found = replace(
        meta,
        positions=jnp.where(live, begin[seq] + place - 1, 0),
        seq_ids=seq_ids,
        query_start=start,
        context_len=jnp.where(length > left_out, meta.context_len - 1, 0),
        num_decodes=jnp.int32(0),
        rotary_lengths=meta.rotary_lengths[rows],
    )
    return found, rows
