"""What the host packs is what the device unpacks, wherever it lies in the vector."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxllm.engine.device.packing import (
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    Packing,
    backbone_packing,
    decode_packing,
    head_packing,
    score_packing,
)
from jaxllm.engine.device.sampler import SamplingRows

SHAPES = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=8
)


def round_trip(packing: Packing, dtype: type) -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 1000, f.shape).astype(dtype) for name, f in packing.fields.items()}
    vector = np.full(packing.size, -1, dtype)
    views = packing.views(vector)
    for name, value in values.items():
        views[name][...] = value
    assert (vector >= 0).all(), "some of the vector belongs to nothing"
    unpacked = packing.unpack(vector)  # type: ignore[arg-type]
    assert unpacked.keys() == values.keys()
    for name, value in values.items():
        assert unpacked[name].shape == value.shape
        np.testing.assert_array_equal(unpacked[name], value)


@settings(max_examples=25)
@given(SHAPES)
def test_any_shapes_round_trip(shapes):
    round_trip(Packing(**shapes), np.int32)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "make", [lambda s: decode_packing(4, 3, s), lambda s: head_packing(2, s)], ids=["decode", "head"]
)
def test_steps_that_sample_round_trip(make, sampled):
    packing = make(sampled)
    round_trip(packing.ints, np.int32)
    round_trip(packing.floats, np.float32)
    assert (packing.floats.size > 0) == sampled
    if sampled:
        names = {*packing.ints.fields, *packing.floats.fields}
        assert set(SamplingRows._fields) <= names
        assert {*SAMPLING_INTS, *SAMPLING_FLOATS} <= names
        assert packing.ints.fields["seed"].shape[1:] == (2,)


def test_steps_that_do_not_sample_round_trip():
    round_trip(backbone_packing(16, 4, 3), np.int32)
    round_trip(score_packing(8), np.int32)


def test_a_small_backbone_has_no_more_sequences_than_tokens():
    assert backbone_packing(16, 256, 3).fields["page_table"].shape == (16, 3)
    assert backbone_packing(512, 256, 3).fields["page_table"].shape == (256, 3)


def test_worked_example_of_the_docstring():
    packing = Packing(tokens=(4,), page_table=(2, 3))
    assert packing.size == 10
    assert packing.views(np.arange(10))["page_table"].tolist() == [[4, 5, 6], [7, 8, 9]]
