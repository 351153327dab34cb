"""Drafts of a module that reads the model's states: one of its own checkpoint (MTP), or an EAGLE-3 head.

It reads the model's state of a token together with the token after it. So it runs beside the model in every step, one
token behind: the last token's state waits in the sequence's slot until the next step brings what follows.

A page of the module's is like one of the model's but for its last row, which depends on the token after the page too.
Behind a cached prefix that row stays as the sequence left it which filled the page: the state that it is made of is not
there, and others may be reading it. It has no say in anything but drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jaxllm.engine.core.batch import decode_batch
from jaxllm.engine.core.feature import RanModel, Traced
from jaxllm.engine.core.keys import Variant
from jaxllm.engine.core.sampler import choose
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.drafts.drafter import Asked, with_own
from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.models.predictor import Predicted, Predictor
from jaxllm.pallas_kernels import StepMetadata

LayerCaches = tuple[Cache, ...]


@dataclass(frozen=True)
class ModuleDrafter:
    """Drafts up to `num_tokens` tokens with `module`, whose caches come behind the `num_own` of `model`."""

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
        """Caches, slots, drafts [S, K], and how many there are for each sequence."""
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
