"""What the host packs is what the device unpacks, wherever it lies in the vector."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxllm.engine.core.keys import SAMPLED, Key, Kind
from jaxllm.engine.core.packing import SETTING_FLOATS, SETTING_INTS, Packing, admit_packing
from jaxllm.engine.core.sampler import SamplingRows
from jaxllm.engine.features import features_of, features_of_encoder
from jaxllm.engine.features.scores import score_packing
from jaxllm.models.caches import PerSlot
from tests.engine.step_sizes import PAGED, step_sizes

SHAPES = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=8
)


def packing_of(kind: Kind, size: int, *words: str, **fields: Any) -> Packing:
    """What such a step of an engine of these sizes is sent."""
    sizes = step_sizes(**fields)
    features = features_of_encoder() if kind == "encode" else features_of(sizes, widest_activation=16)
    return features.packing(Key(kind, size, frozenset(words)), sizes)


def round_trip(packing: Packing, dtype: type) -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 1000, f.shape).astype(dtype) for name, f in packing.fields.items()}
    vector = np.full(packing.size, -1, dtype)
    views = packing.views(vector)
    for name, value in values.items():
        views[name][...] = value
    assert (vector >= 0).all(), "some of the vector belongs to nothing"
    unpacked = jax.jit(packing.unpack)(vector)
    assert unpacked.keys() == values.keys()
    for name, value in values.items():
        assert unpacked[name].shape == value.shape
        np.testing.assert_array_equal(unpacked[name], value)


@settings(max_examples=25)
@given(SHAPES)
def test_any_shapes_round_trip(shapes):
    round_trip(Packing(**shapes), np.int32)


STATES = PAGED, PerSlot(((4,),), (None,))


@pytest.mark.parametrize(
    "packing",
    [
        packing_of("decode", 4), packing_of("decode", 4, caches=STATES), packing_of("head", 2),
        packing_of("head", 2, *SAMPLED, "grammar"), packing_of("verify", 4, most_ahead=3),
        packing_of("verify", 4, *SAMPLED, "grammar", most_ahead=3), packing_of("backbone", 16, max_num_seqs=4),
        packing_of("backbone", 16, "patching4", "captures1", caches=STATES), packing_of("encode", 16, "pooling"),
        score_packing(8), admit_packing(3), SETTING_INTS,
    ],
)  # fmt: skip
def test_steps_round_trip(packing):
    round_trip(packing, np.int32)


def test_what_a_feature_is_sent_goes_with_its_own_steps_alone():
    fields = packing_of("backbone", 16).fields.keys()
    assert packing_of("backbone", 16, "patching4").fields.keys() - fields == {"patch_layers", "patch_rows"}
    assert packing_of("head", 4, *SAMPLED).fields.keys() == packing_of("head", 4).fields.keys()
    assert packing_of("head", 4, *SAMPLED, "grammar").fields["mask"].shape == (4, 4)  # of 100 tokens


def test_a_slot_is_told_everything_the_sampler_asks_for():
    names = {*SETTING_INTS.fields, *SETTING_FLOATS.fields, "slot", "position"}
    assert set(SamplingRows._fields) <= names
    assert SETTING_INTS.fields["seed"].shape == (2,)


def test_rows_of_many_slots_unpack_together():
    packing = Packing(a=(), b=(2,))
    unpacked = packing.unpack(jnp.arange(12).reshape(4, 3))
    assert unpacked["a"].tolist() == [0, 3, 6, 9]
    assert unpacked["b"].tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]


def test_what_a_decode_sends_does_not_grow_with_the_context():
    """256 rows of 128k tokens: 3 KB, where page tables would be 8 MB."""
    assert 4 * packing_of("decode", 256).size < 4096


def test_a_small_backbone_has_no_more_sequences_than_tokens():
    assert packing_of("backbone", 16, max_num_seqs=256).fields["slot"].shape == (16,)
    assert packing_of("backbone", 512, max_num_seqs=256).fields["slot"].shape == (256,)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8), st.sampled_from([1, 8, 16]))
def test_a_backbone_has_room_for_every_page_that_its_chunks_may_gain(chunks, page_size):
    tokens = sum(length for _, length in chunks)
    gained = sum(-(-(begin + length) // page_size) - -(-begin // page_size) for begin, length in chunks)
    packing = packing_of("backbone", tokens, max_num_seqs=len(chunks), page_size=page_size)
    assert gained <= packing.fields["new_pages"].shape[0]


def test_worked_example_of_the_docstring():
    packing = Packing(tokens=(4,), page_table=(2, 3))
    assert packing.size == 10
    assert packing.views(np.arange(10))["page_table"].tolist() == [[4, 5, 6], [7, 8, 9]]
