"""Every step that can happen has a bucket, and no bucket is much larger than needed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxllm.engine.core.sizes import Buckets, powers_of_two, smallest_covering
from jaxllm.errors import ConfigError


@given(seqs=st.integers(1, 4096), tokens=st.integers(16, 10_000), smallest=st.integers(1, 2), data=st.data())
def test_everything_up_to_the_limits_is_covered(seqs, tokens, smallest, data):
    buckets = Buckets.build(seqs, tokens, smallest_rows=smallest)
    for sizes, limit in ((buckets.decode, seqs), (buckets.head, seqs), (buckets.prefill, tokens)):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == max(limit, sizes[0])
        needed = data.draw(st.integers(1, limit))
        size = smallest_covering(sizes, needed)
        assert size >= needed
        assert size == sizes[0] or size < 2 * needed
        assert not any(needed <= other < size for other in sizes)


def test_no_step_has_fewer_rows_than_the_smallest():
    buckets = Buckets.build(1, 16, smallest_rows=2)
    assert (buckets.decode, buckets.head, buckets.prefill) == ((2,), (2,), (16,))
    with pytest.raises(ConfigError, match="decode_buckets holds 1: at least 2 on this platform"):
        Buckets.build(8, 64, smallest_rows=2, decode=[1, 4])
    assert Buckets.build(8, 64, smallest_rows=1, decode=[1, 4]).decode == (1, 4, 8)


def test_sizes_may_be_chosen_up_to_the_limits():
    buckets = Buckets.build(8, 64, decode=[4, 2], prefill=[])
    assert (buckets.decode, buckets.head, buckets.prefill) == ((2, 4, 8), (2, 4, 8), (64,))
    with pytest.raises(ConfigError, match="decode_buckets holds 16: at most max_num_seqs, which is 8"):
        Buckets.build(8, 64, decode=[2, 16])
    with pytest.raises(ConfigError, match="prefill_buckets holds 65: at most max_num_batched_tokens, which is 64"):
        Buckets.build(8, 64, prefill=[65])


@pytest.mark.parametrize(
    ("first", "last", "sizes"),
    [(2, 24, (2, 4, 8, 16, 24)), (2, 2, (2,)), (2, 3, (2, 3)), (16, 64, (16, 32, 64)), (16, 65, (16, 32, 64, 65))],
)
def test_powers_of_two(first, last, sizes):
    assert powers_of_two(first, last) == sizes
