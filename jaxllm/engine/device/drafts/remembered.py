"""Texts that drafts are looked for in beside a sequence's own: where each goes in the ring that the device keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.engine.device.packing import RECALLED_AT_ONCE, recall_packing


class RememberedTexts:
    """A ring of `size` tokens, in which a new text takes the place of the oldest."""

    def __init__(self, size: int):
        self._size = size
        self._place = 0
        self.tokens = np.zeros(size, np.int32)
        """The same ring on the host, as `Slots.remembered` has it."""

    def add(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """What the device is told of a text, as vectors of `recall_packing`; of a longer one the end is kept."""
        if not self._size or not tokens:
            return
        text = np.append(np.asarray(tokens[-(self._size - 1) :], np.int32) + 1, np.int32(0))
        packing = recall_packing()
        for start in range(0, len(text), RECALLED_AT_ONCE):
            part = text[start : start + RECALLED_AT_ONCE]
            ints = np.zeros(packing.size, np.int32)
            x = packing.views(ints)
            x["place"][...], x["count"][...] = self._place, len(part)
            x["tokens"][: len(part)] = part
            self.tokens[(self._place + np.arange(len(part))) % self._size] = part
            self._place = (self._place + len(part)) % self._size
            yield ints
