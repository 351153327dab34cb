"""Masks of one bit a token, against sets of token ids."""

from __future__ import annotations

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from jaxllm.engine.core.sampler import ALL, allow, allow_only, allowed, forbid, mask_of, mask_words

VOCABS = (1, 31, 32, 33, 64, 100)
"""Each is another shape, which is compiled once."""


@given(vocab=st.sampled_from(VOCABS), data=st.data())
def test_a_mask_allows_the_tokens_that_it_was_made_of(vocab: int, data: st.DataObject) -> None:
    ids = st.integers(0, vocab - 1)
    tokens, more = data.draw(st.sets(ids)), data.draw(ids)
    mask = mask_of(tokens, vocab)
    assert mask.shape == (mask_words(vocab),) == (len(range(0, vocab, 32)),)
    assert found(mask, vocab) == tokens
    allow(mask, more)
    assert found(mask, vocab) == tokens | {more}
    forbid(mask, more)
    assert found(mask, vocab) == tokens - {more}
    allow_only(mask, more)
    assert found(mask, vocab) == {more}


def test_a_word_may_allow_all_of_its_tokens() -> None:
    assert found(np.full(2, ALL, np.int32), 64) == set(range(64))


def found(mask: np.ndarray, vocab: int) -> set[int]:
    return set(np.flatnonzero(allowed(jnp.asarray(mask[None]), vocab)[0]).tolist())
