"""Drafts out of a sequence's own text, against a search that reads it token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.features.drafts.ngrams import ngram_drafts
from jaxllm.engine.features.drafts.rules import NgramDrafts

NONE = jnp.zeros(0, jnp.int32)


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
    drafts, count = ngram_drafts(jnp.asarray(history), jnp.asarray(position), NONE, rule)
    found = count == rule.num_tokens
    expected = [searched(row[: end + 1].tolist(), rule) for row, end in zip(history, position, strict=True)]
    assert found.tolist() == [text is not None for text in expected]
    assert 20 < sum(found.tolist()) < rows
    for row, text in zip(drafts.tolist(), expected, strict=True):
        assert text is None or row == text


def test_a_text_too_short_to_repeat_itself_has_no_drafts():
    history = jnp.zeros((3, 8), jnp.int32)
    _, count = ngram_drafts(history, jnp.asarray([0, 1, 2]), NONE, NgramDrafts(2, 2, 2))
    assert count.tolist() == [0, 0, 2]


def longest(text: list[int], ends: list[int], most: int) -> int:
    """How many of the last of `ends` the text ends with."""
    return next(n for n in range(min(most, len(text), len(ends)), -1, -1) if n == 0 or text[-n:] == ends[-n:])


def test_a_longer_stretch_of_a_remembered_text_is_better_and_ends_with_it():
    rule = NgramDrafts(4, 2, 5, remembered=64)
    dice = np.random.default_rng(8)
    sequences, length, ahead, ended = 200, 30, 0, 0
    history = dice.integers(0, 4, (sequences, length))
    position = dice.integers(0, length, sequences)
    texts = [dice.integers(0, 4, n).tolist() for n in (1, 9, 20, 2, 14)]
    ring = np.array([token for text in texts for token in [*(np.array(text) + 1), 0]], np.int32)
    ring = np.roll(np.pad(ring, (0, 64 - len(ring))), 50)  # the last text goes on at the beginning
    drafts, count = ngram_drafts(jnp.asarray(history), jnp.asarray(position), jnp.asarray(ring), rule)
    for row, end, found, number in zip(history, position, drafts.tolist(), count.tolist(), strict=True):
        text = row[: end + 1].tolist()
        own = max((longest(text[:at], text, rule.longest) for at in range(1, end + 1)), default=0)
        places = [(longest(t[:at], text, rule.longest), t[at : at + 4]) for t in texts for at in range(1, len(t))]
        best = max(length for length, _ in places)
        if best >= 2 and best > (own if own >= 2 else 0):
            assert number in (1, 2, 3, 4) and (best, found[:number]) in places
            ahead, ended = ahead + 1, ended + (number < 4)
        else:
            assert (number, found) == (4, searched(text, rule)) if own >= 2 else number == 0
    assert ahead > 20 < ended < ahead
