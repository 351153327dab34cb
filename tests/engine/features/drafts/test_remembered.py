"""The ring of remembered texts holds what a list would: the last tokens of all texts, each text's end marked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.core.registry import Features
from jaxllm.engine.features.drafts.feature import RECALL, DraftsFeature
from jaxllm.engine.features.drafts.ngrams import RememberedTexts
from jaxllm.engine.features.drafts.rules import DraftDepth, NgramDrafts
from tests.engine.step_sizes import NoModel, step_sizes

LENGTHS = {64: (1, 30, 63, 64, 200, 0, 5), 1500: (511, 512, 513, 3, 1400, 90, 2000, 7)}


@pytest.mark.parametrize("size", LENGTHS)
def test_a_new_text_takes_the_place_of_the_oldest(size: int) -> None:
    dice = np.random.default_rng(size)
    drafts = DraftsFeature(NgramDrafts(2, 1, 2, remembered=size), DraftDepth(2))
    recall = jax.jit(drafts.build(RECALL, NoModel(step_sizes(), Features())).step)
    own = {"remembered": jnp.zeros(size, jnp.int32)}
    texts, said = RememberedTexts(size), np.zeros(size, np.int32)
    for length in LENGTHS[size]:
        text = dice.integers(0, 2**20, length).tolist()
        for ints in texts.add(text):
            (own,) = recall({"drafts": own}, jnp.asarray(ints))
        if text:
            said = np.concatenate([said, np.array(text[-(size - 1) :]) + 1, [0]])
        end = (len(said) - size) % size  # where the next text goes
        np.testing.assert_array_equal(np.roll(own["remembered"], -end), said[-size:])


def test_without_a_ring_nothing_is_remembered() -> None:
    assert list(RememberedTexts(0).add([1, 2, 3])) == []
