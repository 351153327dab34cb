"""The functions that are compiled: everything a step does on the device.

A decode-only step is one of them, `decode`. A step with prefill in it is `backbone`, which leaves the hidden states in
a buffer of fixed size, and then `head` for the rows that sample; so there are as many shapes as decode, prefill and
head buckets together, not their product. Decode and head come in variants; a mask, which a grammar fills, is an input
of the head, or of a `verify` that tries drafts.

Where a model is parted into stages, those before the last have `decode_layers` and `backbone_layers`, which hand the
hidden states on; what a stage is handed is the last thing that such a step is sent.

Every one of them returns a tuple: what it changed of the device's own, as `Key.uses` says, then its output, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.engine.device.batch import Fields, decode_batch, mixed_batch, whole_texts
from jaxllm.engine.device.choice import choose
from jaxllm.engine.device.drafts.drafter import Ran
from jaxllm.engine.device.drafts.verify import verify
from jaxllm.engine.device.forward import forward, forward_read
from jaxllm.engine.device.keys import PLAIN, Key, Variant
from jaxllm.engine.device.packing import (
    Packing,
    backbone_packing,
    decode_packing,
    encode_packing,
    head_packing,
    verify_packing,
)
from jaxllm.engine.device.readout_steps import ReadoutSteps
from jaxllm.engine.device.slots import Slots
from jaxllm.engine.device.state_steps import StateSteps
from jaxllm.engine.masks import mask_words
from jaxllm.models.layers.patching import StepPatches, patching
from jaxllm.models.layers.taps import Recorder, recording

_AFTER_FIRST = {"tokens": -1, "new_page": 0, "state_read": 0}
"""What a decode of several tokens is told for those after the first: each is in the history, in a page that is known,
and goes on from the state in its slot."""


class StepFunctions(ReadoutSteps, StateSteps):
    """Builds the jitted step functions of one model on one mesh, with the abstract arguments to compile them for."""

    def step(self, key: Key) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The jitted function that a key names, and the abstract arguments to compile it for; nothing is traced yet."""
        varied: dict[str, Callable[..., Any]] = {
            "decode": self.decode,
            "verify": self.verify,
            "backbone": self.backbone,
            "head": self.head,
        }
        if key.kind in varied:
            return varied[key.kind](key.size, key.variant)
        sized: dict[str, Callable[..., Any]] = {
            "score": self.score,
            "score_given": self.score_given,
            "score_all": self.score_all,
            "token_logits": self.token_logits,
            "unembed": self.unembed,
            "encode": self.encode,
            "read_pages": partial(self.read_rows, "read_pages", "page"),
            "write_pages": partial(self.write_rows, "write_pages", "page"),
            "read_states": partial(self.read_rows, "read_states", "state"),
            "write_states": partial(self.write_rows, "write_states", "state"),
            "decode_layers": self.decode_layers,
            "backbone_layers": self.backbone_layers,
            "took": self.took,
        }
        unsized: dict[str, Callable[..., Any]] = {
            "pool": self.pool,
            "admit": self.admit,
            "adjust": self.adjust,
            "remember": self.remember,
            "recall": self.recall,
            "adapt": self.adapt,
            "steer": partial(self.put_row, "steer"),
            "process": partial(self.put_row, "process"),
        }
        return sized[key.kind](key.size) if key.kind in sized else unsized[key.kind]()

    def decode(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: up to `decode_steps` tokens for each of `rows`.

        What is sampled has `decode_steps` rows for each sequence in turn, of which the first `num_steps` are filled.
        """
        packing = decode_packing(rows, self._sizes.has_states)
        page_size, most = self._sizes.page_size, self._sizes.decode_steps

        def one(weights: Any, caches: Any, slots: Slots, x: Fields, *handed: jax.Array) -> Any:
            model, drafter, before = self._model(weights), self._drafter(weights), slots
            tokens, meta, slots = decode_batch(x, slots, page_size, variant.adapted)
            reads = drafter.reads if drafter is not None else ()
            hidden, states, caches = forward_read(model, tokens, caches, meta, reads, handed)
            if drafter is not None and drafter.follows_decodes:
                caches, slots = drafter.follow(Ran(tokens, states, meta), caches, before, slots)
            slots, out = choose(model, hidden, x | {"position": meta.positions}, slots, variant, self._process(weights))
            return caches, slots, out

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array, *handed: jax.Array) -> Any:
            x = packing.unpack(ints)
            if most == 1:
                return one(weights, caches, slots, x, *handed)
            further = x | {name: jnp.full_like(x[name], value) for name, value in _AFTER_FIRST.items() if name in x}

            def body(index: jax.Array, carry: Any) -> Any:
                caches, slots, sampled = carry
                fields = jax.tree.map(partial(jnp.where, index == 0), x, further)
                caches, slots, out = one(weights, caches, slots, fields)
                return caches, slots, jax.tree.map(lambda all, new: all.at[:, index].set(new), sampled, out)

            shapes = jax.eval_shape(one, weights, caches, slots, x)[2]
            nothing = jax.tree.map(lambda a: jnp.zeros((rows, most, *a.shape[1:]), a.dtype), shapes)
            caches, slots, sampled = lax.fori_loop(0, x["num_steps"], body, (caches, slots, nothing))
            return caches, slots, jax.tree.map(lambda a: a.reshape(rows * most, *a.shape[2:]), sampled)

        return self._build(Key("decode", rows, variant), step, self.state.ints(packing.size), *self._handed(rows))

    def verify(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: a token for each row, and right drafts."""
        sizes = self._sizes
        words = mask_words(sizes.vocab_size) if variant.masked else 0
        packing = verify_packing(rows, sizes.has_states, sizes.num_drafts(rows), words)
        rules: dict[str, Any] = {"variant": variant, "page_size": sizes.page_size}

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array) -> Any:
            drafter = self._drafter(weights, rows)
            assert drafter is not None, "only an engine that tries drafts verifies any"
            parts = {"process": self._process(weights), **rules}
            return verify(partial(self._model, weights), caches, slots, packing.unpack(ints), drafter=drafter, **parts)

        return self._build(Key("verify", rows, variant), step, self.state.ints(packing.size))

    def backbone(self, tokens: int, variant: Variant = PLAIN) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, hidden, ints) -> (caches, slots, hidden)`: `tokens` tokens up to the last norm.

        One that records gives the activations too, `[variant.recorded, T, W]`. One that is patched takes the patches
        too, float32 `[variant.patched, E]`.
        """
        sizes, count = self._sizes, variant.recorded
        taps, recorder = sizes.taps if count else (), partial(Recorder, count=count, width=sizes.widest_activation)
        limits = sizes.max_num_seqs, sizes.page_size, sizes.has_states
        packing = backbone_packing(tokens, *limits, taps, variant.patched)
        sent, patched = [self.state.ints(packing.size), *self._handed(tokens)], variant.patched > 0
        if patched:
            sent.append(self.state.replicated((variant.patched, sizes.hidden_size), jnp.float32))

        def step(
            weights: Any, caches: Any, slots: Slots, buffer: jax.Array, ints: jax.Array, *others: jax.Array
        ) -> Any:
            before, drafter = slots, self._drafter(weights)
            x = packing.unpack(ints)
            ids, meta, slots = mixed_batch(x, slots, variant.adapted)
            patches = StepPatches(x["patch_layers"], x["patch_rows"], *others) if patched else None
            handed = () if patched else others
            with patching(patches), recording(recorder(x["taps"]) if count else None) as records:
                reads = drafter.reads if drafter is not None else ()
                hidden, states, caches = forward_read(self._model(weights), ids, caches, meta, reads, handed)
            if drafter is not None:
                caches, slots = drafter.follow(Ran(ids, states, meta), caches, before, slots)
            taken = () if records is None else (records.taken,)
            hidden = hidden.astype(buffer.dtype)
            if self.state.num_batches > 1:  # one with nothing in this step may have yet to read what it left in another
                hidden = jnp.where(x["num_seqs"] > 0, hidden, buffer[:tokens])
            return caches, slots, lax.dynamic_update_slice(buffer, hidden, (0, 0)), *taken

        return self._build(Key("backbone", tokens, variant), step, *sent)

    def decode_layers(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, [S, E])`: a decode up to the end of this stage."""
        packing = decode_packing(rows, self._sizes.has_states)
        return self._layers(
            Key("decode_layers", rows), packing, lambda x, slots: decode_batch(x, slots, self._sizes.page_size)
        )

    def backbone_layers(self, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, [T, E])`: a backbone up to the end of this stage."""
        sizes = self._sizes
        packing = backbone_packing(tokens, sizes.max_num_seqs, sizes.page_size, sizes.has_states)
        return self._layers(Key("backbone_layers", tokens), packing, mixed_batch)

    def _layers(
        self, key: Key, packing: Packing, batch: Callable[..., Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array, *handed: jax.Array) -> Any:
            tokens, meta, slots = batch(packing.unpack(ints), slots)
            hidden, caches = forward(self._model(weights), tokens, caches, meta, handed=handed)
            return caches, slots, hidden.astype(self.state.hidden_dtype)

        return self._build(key, step, self.state.ints(packing.size), *self._handed(key.size))

    def _handed(self, rows: int) -> list[Any]:
        """What the stage before hands on to this one, if there is one before."""
        stage = self._sizes.stage
        return [] if stage is None or stage.first else [self.state.hidden(rows)]

    def encode(self, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> (hidden,)`: `tokens` tokens of whole texts through an encoder."""
        packing = encode_packing(tokens, self._sizes.max_num_seqs)

        def step(weights: Any, buffer: jax.Array, ints: jax.Array) -> Any:
            ids, meta = whole_texts(packing.unpack(ints))
            hidden, _ = self._model(weights)(ids, (), meta)
            return (lax.dynamic_update_slice(buffer, hidden.astype(buffer.dtype), (0, 0)),)

        return self._build(Key("encode", tokens), step, self.state.ints(packing.size))

    def head(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, slots, hidden, ints) -> (slots, Sampled)`: a token for each of `rows` hidden states."""
        packing = head_packing(rows, mask_words(self._sizes.vocab_size) if variant.masked else 0)

        def step(weights: Any, slots: Slots, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            x |= {"position": slots.position[x["slot"]] - 1}
            return choose(self._model(weights), hidden[x["hidden_row"]], x, slots, variant, self._process(weights))

        return self._build(Key("head", rows, variant), step, self.state.ints(packing.size))
