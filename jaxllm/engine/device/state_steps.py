"""Steps that run no model: they tell slots of requests, and copy pages and what else lives on the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.keys import USES, Key, Kind
from jaxllm.engine.device.packing import (
    SETTING_FLOATS,
    admit_packing,
    recall_packing,
)
from jaxllm.engine.device.slots import Slots, adjust, admit, recall, remember, took
from jaxllm.engine.device.step_builder import StepBuilder
from jaxllm.engine.offload.cache_rows import RowKind
from jaxllm.engine.settings import Adjustments


class StateSteps(StepBuilder):
    """Each changes or copies one part of the state."""

    def admit(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, ints, floats) -> (slots,)`: a request takes its slot."""
        packing = admit_packing(self._sizes.pages_per_seq)
        floats = self.state.replicated((SETTING_FLOATS.size + self._sizes.adapter_places,), jnp.float32)
        return self._build(Key("admit"), lambda *x: (admit(*x),), self.state.ints(packing.size), floats)

    def adjust(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, *Adjustments) -> (slots,)`."""
        slots = self.state.abstract().slots
        names = [name for name in Adjustments._fields if name != "slot"]
        rows = [self.state.replicated(getattr(slots, name).shape[1:], getattr(slots, name).dtype) for name in names]

        def step(slots: Slots, *fields: jax.Array) -> tuple[Slots]:
            return (adjust(slots, Adjustments(*fields)),)

        return self._build(Key("adjust"), step, self.state.ints(1), *rows)

    def remember(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, slot, history) -> (slots,)`: the tokens that a request has when it takes its slot."""
        length = self.state.abstract().slots.history.shape[1]
        return self._build(Key("remember"), lambda *x: (remember(*x),), self.state.ints(1), self.state.ints(length))

    def recall(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, ints) -> (slots,)`: a part of a text that drafts are looked for in."""
        return self._build(Key("recall"), lambda *x: (recall(*x),), self.state.ints(recall_packing().size))

    def took(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, slot, tokens) -> (slots,)`: what the last stage has sampled, for the first one to run next."""
        return self._build(Key("took", rows), lambda *x: (took(*x),), self.state.ints(rows), self.state.ints(rows))

    def adapt(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(adapters, place, *rows) -> (adapters,)`: an adapter takes its place, a row of each table."""
        tables = self._adapted.tables if self._adapted is not None else ()

        def step(adapters: Any, place: jax.Array, *rows: jax.Array) -> tuple[Any]:
            return (tuple(t.at[place[0]].set(row) for t, row in zip(adapters, rows, strict=True)),)

        rows = [self.state.sharded(t.shape[1:], t.dtype, t.axes[1:]) for t in tables]
        return self._build(Key("adapt"), step, self.state.ints(1), *rows)

    def put_row(self, kind: Kind) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(part, slot, *row) -> (part,)`: what the request that took a slot is steered by, or is processed with."""
        parts, tree = jax.tree.flatten(self.state.on_demand()[USES[kind].takes[0]])

        def step(state: Any, slot: jax.Array, *rows: jax.Array) -> tuple[Any]:
            pairs = zip(jax.tree.leaves(state), rows, strict=True)
            return (jax.tree.unflatten(tree, [part.at[slot[0]].set(row) for part, row in pairs]),)

        rows = [self.state.replicated(part.shape[1:], part.dtype) for part in parts]
        return self._build(Key(kind), step, self.state.ints(1), *rows)

    def read_rows(self, kind: Kind, of: RowKind, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(caches, numbers) -> (rows,)`: `count` pages, or states, of each buffer that has any."""
        has_them = self._has_rows(of)

        def step(caches: Any, numbers: jax.Array) -> tuple[tuple[jax.Array, ...]]:
            buffers = zip(jax.tree.leaves(caches), has_them, strict=True)
            return (tuple(buffer[numbers] for buffer, has in buffers if has),)

        specs = tuple(P(*buffer.axes) for buffer in self._sizes.buffers_of(of))
        return self._build(Key(kind, count), step, self.state.ints(count), output=specs)

    def write_rows(self, kind: Kind, of: RowKind, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(caches, numbers, *rows) -> (caches,)`: pages, or states, are filled with what `read_rows` gave."""
        has_them = self._has_rows(of)

        def step(caches: Any, numbers: jax.Array, *rows: jax.Array) -> tuple[Any]:
            buffers, tree = jax.tree.flatten(caches)
            given = iter(rows)
            written = [
                buffer.at[numbers].set(next(given)) if has else buffer
                for buffer, has in zip(buffers, has_them, strict=True)
            ]
            return (jax.tree.unflatten(tree, written),)

        shapes = [self.state.sharded((count, *b.shape[1:]), b.dtype, b.axes) for b in self._sizes.buffers_of(of)]
        return self._build(Key(kind, count), step, self.state.ints(count), *shapes)

    def _has_rows(self, of: RowKind) -> list[bool]:
        """Of each array that layers keep, in turn, whether it has a row for each page, or for each state."""
        sizes, found = self._sizes, list[bool]()
        paged = iter(sizes.is_paged)
        for buffers, layer in zip(sizes.buffers, self.state.abstract().caches, strict=True):
            found += [next(paged) == (of == "page") for _ in buffers]
            found += [False] * (len(jax.tree.leaves(layer)) - len(buffers))  # places of experts
        return found
