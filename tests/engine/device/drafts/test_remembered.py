"""The ring of remembered texts holds what a list would: the last tokens of all texts, each text's end marked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.device.drafts.remembered import RememberedTexts
from jaxllm.engine.device.slots import Slots, recall, slot_shapes

LENGTHS = {64: (1, 30, 63, 64, 200, 0, 5), 1500: (511, 512, 513, 3, 1400, 90, 2000, 7)}


@pytest.mark.parametrize("size", LENGTHS)
def test_a_new_text_takes_the_place_of_the_oldest(size: int) -> None:
    dice = np.random.default_rng(size)
    shapes = slot_shapes(1, 8, 1, 16, remembered=size)
    slots = Slots(*(jnp.zeros(a.shape, a.dtype) for a in jax.tree.leaves(shapes)))
    texts, said = RememberedTexts(size), np.zeros(size, np.int32)
    for length in LENGTHS[size]:
        text = dice.integers(0, 2**20, length).tolist()
        for ints in texts.add(text):
            slots = recall(slots, jnp.asarray(ints))
        if text:
            said = np.concatenate([said, np.array(text[-(size - 1) :]) + 1, [0]])
        end = (len(said) - size) % size  # where the next text goes
        np.testing.assert_array_equal(np.roll(slots.remembered, -end), said[-size:])


def test_without_a_ring_nothing_is_remembered() -> None:
    assert list(RememberedTexts(0).add([1, 2, 3])) == []
