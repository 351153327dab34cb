"""A model in stages: layers of it on devices of their own, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.engine.core.device import Device
from jaxllm.engine.core.device_state import State
from jaxllm.engine.core.executables import Compiles, Executables
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.models.options import Stage
from jaxllm.sharding.mesh import HandOver


class StageDevice(NamedTuple):
    stage: Stage
    device: Device | None


@dataclass(eq=False)
class Untold:
    """Tokens that the last stage has sampled, or will have, and that the first one has not been told."""

    slots: np.ndarray
    """int32 `[R]`: whose they are; padding's slot for padding."""
    tokens: jax.Array | None
    """int32 `[R]`, on the first stage's devices; None where they are another process's."""


class Stages:
    """The way of each step through the stages, of which this process may have some or all.

    Nothing waits in between: what a stage gives is on its way to the next as soon as it is there, and every stage is
    sent the same vectors, from which it keeps its own positions and page tables.

    What is sampled has to reach the first stage, which runs it next. It is told only when that is about to happen: what
    it is told changes its slots, so that whatever it runs afterwards waits until the last stage has sampled. Worked
    example, two stages and parts A and B of a step; the first stage is sent

        A, B, what A sampled, the next A, what B sampled, the next B

    and runs B while the last stage runs A, and the next A while the last stage runs B.
    """

    def __init__(
        self,
        earlier: Sequence[StageDevice],
        ways: Sequence[HandOver],
        sizes: StepSizes,
        hidden_dtype: np.dtype,
        features: Features,
    ):
        """`ways` lead from each stage to the next, and from the last to the first, in `hidden_dtype`."""
        self.earlier, self._ways = list(earlier), ways
        self._sizes, self._features, self._hidden_dtype = sizes, features, hidden_dtype
        self._nobody = sizes.max_num_seqs
        self._untold: list[Untold] = []

    def run(self, key: Key, *vectors: Any) -> None:
        """Run a step in a process that follows process 0, and does not have the last stage."""
        self.pass_on(None, key, *vectors)

    def pass_on(self, last: Callable[..., Any] | None, key: Key, *vectors: Any) -> Any:
        """Run a step; `last` runs it in the last stage, where that is here. Returns what it gives, or else None."""
        runs, samples = key.kind in ("decode", "backbone"), key.kind in ("decode", "head")
        slots = np.zeros(0, np.int32)
        if runs or samples:
            slots = self._features.packing(key, self._sizes).views(vectors[0])["slot"].copy()
        if runs:
            self._tell_first(slots)
            vectors = (*vectors, self._through_earlier(key, vectors[0]))
        elif key.variant == {"admit"}:
            self._forget(int(vectors[0][0]))
            for _, device in self.earlier:
                if device is not None:
                    device.run(key, *vectors)
        found = None if last is None else last(key, *vectors)
        if samples:
            form = jax.ShapeDtypeStruct(slots.shape, np.int32)
            self._untold.append(Untold(slots, self._ways[-1](None if found is None else found.tokens, form)))
        return found

    def _through_earlier(self, key: Key, ints: np.ndarray) -> jax.Array | None:
        layers = layers_of(key)
        assert layers is not None, "every stage has layers"
        form = jax.ShapeDtypeStruct((key.size, self._sizes.hidden_size), self._hidden_dtype)
        handed = None
        for (stage, device), way in zip(self.earlier, self._ways[:-1], strict=True):
            sent = (ints,) if stage.first else (ints, handed)
            handed = way(None if device is None else device.run(layers, *sent), form)
        return handed

    def _tell_first(self, slots: np.ndarray) -> None:
        """Tell the first stage what was sampled for any of these slots, which it is about to run."""
        running = set(slots.tolist()) - {self._nobody}
        first = self.earlier[0].device
        for untold in [untold for untold in self._untold if not running.isdisjoint(untold.slots.tolist())]:
            if first is not None:
                first.run(Key("took", len(untold.slots)), untold.slots, untold.tokens)
            self._untold.remove(untold)

    def _forget(self, slot: int) -> None:
        for untold in self._untold:
            untold.slots[untold.slots == slot] = self._nobody
        self._untold = [untold for untold in self._untold if (untold.slots != self._nobody).any()]

    def compile(self, key: Key) -> None:
        """Wait until what the stages before the last run of a step can be run at once."""
        for stage, device in self.earlier:
            for part in keys_of(stage, [key]):
                if device is not None:
                    device.compile(part)

    def wait(self) -> None:
        """Block until the stages before the last have run all that they were sent."""
        for _, device in self.earlier:
            if device is not None:
                device.wait()

    def close(self) -> None:
        for _, device in self.earlier:
            if device is not None:
                device.close()


class StagedDevice(Device):
    """The last stage's Device, which has a step run by the stages before it first."""

    def __init__(self, executables: Executables, weights: tuple[jax.Array, ...], state: State, stages: Stages):
        super().__init__(executables, weights, state)
        self.num_parts = len(stages.earlier) + 1
        self._stages = stages

    def run(self, key: Key, *vectors: Any) -> Any:
        return self._stages.pass_on(super().run, key, *vectors)

    def wait(self) -> None:
        self._stages.wait()
        super().wait()

    def compile(self, key: Key) -> None:
        self._stages.compile(key)
        super().compile(key)

    def give_up(self) -> tuple[jax.Array, ...]:
        earlier = [array for _, device in self._stages.earlier if device is not None for array in device.give_up()]
        return (*earlier, *super().give_up())

    @property
    def compiles(self) -> Compiles:
        earlier = [device.compiles for _, device in self._stages.earlier if device is not None]
        return Compiles(*(sum(counts) for counts in zip(*earlier, super().compiles, strict=True)))

    def close(self) -> None:
        self._stages.close()
        super().close()


def keys_of(stage: Stage | None, keys: Iterable[Key]) -> list[Key]:
    """The executables that a stage has for steps; the last one, or the only one, has them by the steps' own names."""
    if stage is None or stage.last:
        return list(dict.fromkeys(keys))
    found = [key for step in keys for key in (layers_of(step), *(tells_first(step) if stage.first else ())) if key]
    return list(dict.fromkeys(found))


def makes(stage: Stage | None, part: Key) -> bool:
    """Whether a stage makes what is called so by the process that has it."""
    if stage is None or part.kind == "put":
        return True
    if part.kind == "took":
        return stage.first
    return (part.kind == "layers") != stage.last


def layers_of(step: Key) -> Key | None:
    """The part of a step that stages before the last run, whatever it does with logits; None if they run none."""
    if step.kind in ("decode", "backbone"):
        return Key("layers", step.size, frozenset({step.kind}))
    return step if step.variant == {"admit"} else None


def tells_first(step: Key) -> list[Key]:
    return [Key("took", step.size)] if step.kind in ("decode", "head") else []
