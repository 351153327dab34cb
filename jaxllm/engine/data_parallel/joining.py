"""One step for several batches, made of the steps that each of them asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.engine.device.keys import Key, Kind, Variant
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.step_packing import step_packing
from jaxllm.engine.masks import ALL

Covering = Callable[[Kind, int, Variant], Key]
"""The step of a kind for so many rows or tokens that does all that a variant does; see `Device.covering`."""

BATCHES: tuple[Kind, ...] = ("backbone", "head", "decode")
"""Steps with a batch: those of one kind are joined, whatever their sizes."""
OF_A_SLOT: tuple[Kind, ...] = ("admit", "adjust", "remember", "steer", "process")
"""Steps that change one slot, which is the first number that they are sent."""


class WantedStep(NamedTuple):
    """A step as one batch asks for it."""

    key: Key
    vectors: tuple[np.ndarray, ...]

    @property
    def order(self) -> int:
        """How late in a turn such a step comes. The earliest runs first, so that its batch catches up with the others;
        those of order 0 come before a batch is packed.
        """
        if self.key.kind in OF_A_SLOT:
            return 0
        return {"backbone": 1, "head": 3, "decode": 4}.get(self.key.kind, 2)


class Joiner:
    """Joins the steps of `sizes` that several batches ask for.

    Worked example: batch 0 asks for `decode-4` and batch 1 for `decode-8-sampled`. Both run `decode-8-sampled`, where
    the last four rows of batch 0 are padding, as they are in any step that is larger than it need be. A batch that asks
    for nothing has padding alone.
    """

    def __init__(self, sizes: StepSizes, covering: Covering):
        self._sizes = sizes
        self._covering = covering
        self._nobody = sizes.max_num_seqs

    def choose(self, asked: dict[int, WantedStep]) -> list[int]:
        """Which of the batches that ask for a step are served first, all by the same one."""
        first = min(asked, key=lambda batch: (asked[batch].order, batch))
        return [batch for batch in asked if _can_join(asked[first].key, asked[batch].key)]

    def join(self, asked: Sequence[WantedStep | None]) -> WantedStep:
        """The step for all batches, of which those with None ask for nothing; its vectors lie one after the other."""
        some = [one for one in asked if one is not None]
        key = some[0].key
        if any(one.key != key for one in some):
            variants = [one.key.variant for one in some]
            variant = Variant(
                sampled=any(v.sampled for v in variants),
                masked=any(v.masked for v in variants),
            )
            key = self._covering(key.kind, max(one.key.size for one in some), variant)
        given = [self._fitted(one, key) if one is not None else None for one in asked]
        nothing = self._idle(key, next(vectors for vectors in given if vectors is not None))
        return WantedStep(key, tuple(map(np.concatenate, zip(*(vectors or nothing for vectors in given), strict=True))))

    def _fitted(self, asked: WantedStep, key: Key) -> tuple[np.ndarray, ...]:
        """What a batch sends, laid out as a larger step of the same kind takes it."""
        if asked.key == key:
            return asked.vectors
        vector = np.zeros(step_packing(key, self._sizes).size, np.int32)
        (vector,) = self._idle(key, (vector,))
        new = step_packing(key, self._sizes).views(vector)
        for name, field in step_packing(asked.key, self._sizes).views(asked.vectors[0]).items():
            new[name][tuple(map(slice, field.shape))] = field
            if name == "query_start":
                new[name][len(field) :] = field[-1]
        return (vector,)

    def _idle(self, key: Key, like: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """What a batch sends that has nothing to do in a step; `like` is what another sends."""
        vectors = tuple(map(np.zeros_like, like))
        if key.kind in BATCHES:
            fields = step_packing(key, self._sizes).views(vectors[0])
            fields["slot"][:] = self._nobody
            if "new_pages" in fields:
                fields["new_pages"][:, 0] = self._nobody
            if "num_steps" in fields:
                fields["num_steps"][...] = 1
            if "mask" in fields:
                fields["mask"][:] = ALL
            if "taps" in fields:
                fields["taps"][:] = key.variant.recorded
            if "patch_layers" in fields:
                fields["patch_layers"][:] = -1
        elif key.kind in OF_A_SLOT:
            vectors[0][0] = self._nobody
        return vectors


def _can_join(key: Key, other: Key) -> bool:
    if key == other:
        return True
    return key.kind == other.kind and key.kind in BATCHES and not key.on_demand and not other.on_demand
