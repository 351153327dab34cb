"""Drafts out of a sequence's own text, against a search that reads it token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.device.ngrams import ngram_drafts
from jaxllm.engine.device.sizes import NgramDrafts


def searched(text: list[int], rule: NgramDrafts) -> list[int] | None:
    """The longest end of `text` that stood somewhere before, the last time that it did, and what followed it."""
    for length in range(min(rule.longest, len(text) - 1), rule.shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                drafts = list(text[end:])
                while len(drafts) < rule.num_tokens:
                    drafts += text[end:]
                return drafts[: rule.num_tokens]
    return None


@pytest.mark.parametrize(
    "rule", [NgramDrafts(4, 1, 3), NgramDrafts(1, 2, 2), NgramDrafts(7, 3, 5), NgramDrafts(2, 1, 1)]
)
def test_the_longest_end_that_stood_before_the_last_time_that_it_did(rule):
    dice = np.random.default_rng(3)
    length, rows = 40, 300
    history = dice.integers(0, dice.integers(2, 6, (rows, 1)), (rows, length))  # what is behind a text is anything
    position = dice.integers(0, length, rows)
    drafts, found = ngram_drafts(jnp.asarray(history), jnp.asarray(position), rule)
    expected = [searched(row[: end + 1].tolist(), rule) for row, end in zip(history, position, strict=True)]
    assert found.tolist() == [text is not None for text in expected]
    assert 20 < sum(found.tolist()) < rows
    for row, text in zip(drafts.tolist(), expected, strict=True):
        assert text is None or row == text


def test_a_text_too_short_to_repeat_itself_has_no_drafts():
    history = jnp.zeros((3, 8), jnp.int32)
    _, found = ngram_drafts(history, jnp.asarray([0, 1, 2]), NgramDrafts(2, 2, 2))
    assert found.tolist() == [False, False, True]
