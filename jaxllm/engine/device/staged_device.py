"""A model in stages: layers of it on devices of their own, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.engine.device.device import Device
from jaxllm.engine.device.device_state import DeviceState
from jaxllm.engine.device.executables import Compiles, Executables
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.packing import backbone_packing, decode_packing, head_packing
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.stage_keys import layers_of
from jaxllm.engine.masks import mask_words
from jaxllm.sharding.mesh import named_sharding


class EarlierStage(NamedTuple):
    """A stage before the last, and where it runs."""

    device: Device
    mesh: Mesh


@dataclass(eq=False)
class Untold:
    """Tokens that the last stage has sampled, or will have, and that the first one has not been told."""

    slots: np.ndarray
    """int32 `[R]`: whose they are; the slot that belongs to nobody where they are nobody's."""
    tokens: jax.Array
    """int32 `[R]`, on the first stage's devices."""


class StagedDevice(Device):
    """The last stage's Device, which has a step run by the stages before it first.

    Nobody waits for anything in between: what a stage gives is on its way to the next as soon as it is there, and every
    stage is sent the same vectors, from which it keeps its own positions and page tables.

    What is sampled has to reach the first stage, which runs it next. It is told only when that is about to happen: what
    it is told changes its slots, so that whatever it runs afterwards waits until the last stage has sampled. Worked
    example, two stages and parts A and B of a step; the first stage is sent

        A, B, what A sampled, the next A, what B sampled, the next B

    and runs B while the last stage runs A, and the next A while the last stage runs B.
    """

    def __init__(
        self,
        executables: Executables,
        weights: tuple[jax.Array, ...],
        state: DeviceState,
        mesh: Mesh,
        earlier: Sequence[EarlierStage],
        sizes: StepSizes,
    ):
        super().__init__(executables, weights, state)
        self.num_parts = len(earlier) + 1
        self._earlier = list(earlier)
        self._sizes = sizes
        self._nobody = sizes.max_num_seqs
        self._arrivals = [named_sharding(at, ()) for at in (*(stage.mesh for stage in earlier), mesh)]
        """Where each stage takes what others give."""
        self._untold: list[Untold] = []

    def run(self, key: Key, *vectors: Any) -> Any:
        runs, samples = key.kind in ("decode", "backbone"), key.kind in ("decode", "head")
        slots = self._slots(key, vectors[0]) if runs or samples else np.zeros(0, np.int32)
        if runs:
            self._tell_first(slots)
            vectors = (*vectors, self._through_earlier(key, vectors[0]))
        elif key.kind == "admit":
            self._forget(int(vectors[0][0]))
            for stage in self._earlier:
                stage.device.run(key, *vectors)
        found = super().run(key, *vectors)
        if samples:
            self._untold.append(Untold(slots, jax.device_put(found.tokens, self._arrivals[0])))
        return found

    def _through_earlier(self, key: Key, ints: np.ndarray) -> jax.Array:
        """The hidden states that the last stage takes, on its devices once they are there."""
        layers = layers_of(key)
        assert layers is not None, "every stage has layers"
        vectors: tuple[Any, ...] = (ints,)
        for stage, arrival in zip(self._earlier, self._arrivals[1:], strict=True):
            vectors = (ints, jax.device_put(stage.device.run(layers, *vectors), arrival))
        handed: jax.Array = vectors[-1]
        return handed

    def _tell_first(self, slots: np.ndarray) -> None:
        """Tell the first stage what was sampled for any of these slots, which it is about to run."""
        running = set(slots.tolist()) - {self._nobody}
        first = self._earlier[0].device
        for untold in [untold for untold in self._untold if not running.isdisjoint(untold.slots.tolist())]:
            first.run(Key("took", len(untold.slots)), untold.slots, untold.tokens)
            self._untold.remove(untold)

    def _forget(self, slot: int) -> None:
        """Another request takes a slot: the first stage need not hear what was sampled for the one before."""
        for untold in self._untold:
            untold.slots[untold.slots == slot] = self._nobody
        self._untold = [untold for untold in self._untold if (untold.slots != self._nobody).any()]

    def _slots(self, key: Key, ints: np.ndarray) -> np.ndarray:
        """The slots of a step's rows, as it has been sent them."""
        sizes = self._sizes
        if key.kind == "decode":
            packing = decode_packing(key.size, sizes.has_states)
        elif key.kind == "head":
            packing = head_packing(key.size, mask_words(sizes.vocab_size) if key.variant.masked else 0)
        else:
            packing = backbone_packing(key.size, sizes.max_num_seqs, sizes.page_size, sizes.has_states)
        return packing.views(ints)["slot"].copy()

    def wait(self) -> None:
        for stage in self._earlier:
            stage.device.wait()
        super().wait()

    def compile(self, key: Key) -> None:
        layers = layers_of(key)
        if layers is not None:
            for stage in self._earlier:
                stage.device.compile(layers)
        super().compile(key)

    def give_up(self) -> tuple[jax.Array, ...]:
        earlier = [array for stage in self._earlier for array in stage.device.give_up()]
        return (*earlier, *super().give_up())

    @property
    def compiles(self) -> Compiles:
        every = [stage.device.compiles for stage in self._earlier] + [super().compiles]
        return Compiles(*(sum(counts) for counts in zip(*every, strict=True)))

    def close(self) -> None:
        for stage in self._earlier:
            stage.device.close()
        super().close()
