"""How fused and sharded parameters are laid out, against the definition: device by device, segment by segment."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxllm.sharding.mesh import Layout, Segment, padded_rows, split_rows


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Every segment in as many pieces as devices, or in fewer, each repeated equally often."""
    tp = draw(st.integers(1, 8))
    pieces = [n for n in range(1, tp + 1) if tp % n == 0]
    segments = st.builds(
        lambda shards, size: Segment(shards * size, shards), st.sampled_from(pieces), st.integers(1, 4)
    )
    return Layout(tuple(draw(st.lists(segments, min_size=1, max_size=4))), tp)


@given(layouts(), st.sampled_from([(), (3,)]))
def test_each_device_holds_its_piece_of_every_segment(layout, trailing):
    tensors = []
    for index, segment in enumerate(layout.segments):
        count = segment.rows * int(np.prod(trailing, dtype=int))
        tensors.append((1000 * index + np.arange(count)).reshape(segment.rows, *trailing))
    whole = layout.assemble(tensors)
    assert whole.shape == (layout.rows, *trailing)
    local = layout.rows // layout.tp
    assert local * layout.tp == layout.rows
    for device in range(layout.tp):
        expected = []
        for tensor, segment in zip(tensors, layout.segments, strict=True):
            pieces = np.split(tensor, segment.shards)
            expected.append(pieces[device // (layout.tp // segment.shards)])
        np.testing.assert_array_equal(whole[device * local : (device + 1) * local], np.concatenate(expected))


def test_worked_example_of_the_docstring():
    layout = Layout((Segment(4, 2), Segment(2, 1)), tp=2)
    out = layout.assemble([np.array(["q0", "q1", "q2", "q3"]), np.array(["k0", "k1"])])
    assert out.tolist() == ["q0", "q1", "k0", "k1", "q2", "q3", "k0", "k1"]


@given(rows=st.integers(1, 700), tp=st.integers(1, 8), multiple=st.sampled_from([1, 8, 64]))
def test_padding_makes_equal_whole_multiples(rows, tp, multiple):
    layout = padded_rows(rows, tp, multiple)
    assert layout.rows >= rows
    assert layout.rows % (tp * multiple) == 0
    assert layout.rows - rows < tp * multiple
    tensor = np.random.default_rng(0).normal(size=(rows, 2))
    out = layout.assemble([tensor])
    np.testing.assert_array_equal(out[:rows], tensor)
    np.testing.assert_array_equal(out[rows:], 0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_tensor_cut_into_equal_pieces_stays_as_it_is(tp):
    tensor = np.arange(16).reshape(8, 2)
    layout = split_rows(8, tp)
    assert layout.rows == 8
    np.testing.assert_array_equal(layout.assemble([tensor]), tensor)
