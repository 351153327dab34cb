"""Where the turns of several batches meet: at each step that one of them wants to run."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from jaxllm.engine.data_parallel.joining import Joiner, WantedStep
from jaxllm.engine.device.device import MOST_RECENT, Device
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.sizes import StepSizes


class Ranks:
    """Runs the steps of `count` batches, each of which has a thread and a rank: its place in every joined step.

    A batch that asks for a step waits until each of the others that act has asked for one too, or has ended its turn.
    Then the thread that came last runs one step for all that can be joined. Nobody waits for the devices here.

    Before it packs its requests, a batch says whether all of them decode. Where another has prompts to compute, all run
    the same two steps, a backbone and a head, instead of a decode besides.
    """

    def __init__(self, device: Device, sizes: StepSizes, count: int):
        self.count = count
        self._device = device
        self._joiner = Joiner(sizes, device.covering)
        self._changed = threading.Condition()
        self._acting: set[int] = set()
        self._asked: dict[int, WantedStep] = {}
        self._said: dict[int, bool] = {}
        """Which batches are about to be packed, and whether they only decode."""
        self._found: dict[int, Any] = {}
        """What steps have given, or what they raised, until those who asked for them have seen it."""

    def begin(self, ranks: list[int]) -> None:
        """Those ranks begin a turn."""
        with self._changed:
            self._acting.update(ranks)

    def end(self, rank: int) -> None:
        """A rank has ended its turn: the others wait for it no longer."""
        with self._changed:
            self._acting.discard(rank)
            self._run_what_is_due()

    def run(self, rank: int, key: Key, vectors: tuple[Any, ...]) -> Any:
        """Enqueue a step for a rank, together with those of others; see `Device.run`."""
        with self._changed:
            self._asked[rank] = WantedStep(key, tuple(map(np.asarray, vectors)))
            found = self._wait(rank)
        if isinstance(found, BaseException):
            raise found
        return found

    def all_decode(self, rank: int, decodes: bool) -> bool:
        """Whether a rank's next step is a decode, like those of all others; see `Device.all_decode`."""
        with self._changed:
            self._said[rank] = decodes
            found: bool = self._wait(rank)
        return found

    def _wait(self, rank: int) -> Any:
        self._run_what_is_due()
        while rank not in self._found:
            self._changed.wait()
        return self._found.pop(rank)

    def _run_what_is_due(self) -> None:
        while (waiting := self._asked.keys() | self._said.keys()) and self._acting <= waiting:
            if self._said and all(one.order > 0 for one in self._asked.values()):
                self._found |= dict.fromkeys(self._said, all(self._said.values()) and not self._asked)
                self._said.clear()
            else:
                served = self._joiner.choose(self._asked)
                asked = {rank: self._asked.pop(rank) for rank in served}
                self._found |= dict.fromkeys(served) | self._run(asked)
            self._changed.notify_all()

    def _run(self, asked: dict[int, WantedStep]) -> dict[int, Any]:
        try:
            step = self._joiner.join([asked.get(rank) for rank in range(self.count)])
            found = self._device.run(step.key, *step.vectors)
        except BaseException as error:
            return dict.fromkeys(asked, error)  # every turn that takes part ends with it
        return {} if found is None else {rank: found[rank] for rank in asked}


class RankDevice(Device):
    """The Device as the batch of one rank sees it: with caches, slots and hidden states of its own."""

    def __init__(self, whole: Device, ranks: Ranks, rank: int):
        # What it has is that of the whole, with which it shares it.
        self._whole, self._ranks, self._rank = whole, ranks, rank
        self._executables, self._parts = whole._executables, whole._parts
        self.most_rows, self.num_parts = whole.most_rows, whole.num_parts
        self.recent = deque(maxlen=MOST_RECENT)

    def run(self, key: Key, *vectors: Any) -> Any:
        self.recent.append(key)
        return self._ranks.run(self._rank, key, vectors)

    def all_decode(self, decodes: bool) -> bool:
        return self._ranks.all_decode(self._rank, decodes)

    def compile(self, key: Key) -> None:
        self._whole.compile(key)

    def close(self) -> None:
        self._whole.close()
