"""What layers keep, and what that takes of a device."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm import EngineConfig
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.start.memory import fewer_sequences, plan_caches
from jaxllm.errors import ConfigError
from jaxllm.models.caches import CacheLayout, Joined, Paged, PerSlot, Repeated, Shared, parts_of
from jaxllm.pallas_kernels.pages import INTERLEAVED
from jaxllm.sharding.mesh import TENSOR

LAYERS = (Paged(8, (64, 64)), Paged(2, (512, 512), window=128), PerSlot(((2, 96), (4, 8, 8)), (1, 0)), Shared(1), None)
FLOATS = CacheLayout(np.dtype(np.float32), page_size=16)


def test_groups_of_pages_differ_in_size_and_not_in_number():
    wide, narrow, *_ = (FLOATS.buffers(spec, 10, 5) for spec in LAYERS)
    assert [buffer.shape for buffer in wide] == [(10, 8, 16, 64)] * 2
    assert [buffer.shape for buffer in narrow] == [(10, 2, 16, 512)] * 2


def test_a_state_has_a_row_for_each_sequence_and_other_layers_keep_nothing():
    _, _, state, shared, nothing = (FLOATS.buffers(spec, 10, 5) for spec in LAYERS)
    assert [(buffer.shape, buffer.axes) for buffer in state] == [
        ((5, 2, 96), (None, None, TENSOR)),
        ((5, 4, 8, 8), (None, TENSOR, None, None)),
    ]
    assert shared == nothing == ()


def test_bytes_are_added_up_over_the_layers():
    assert FLOATS.page_bytes(LAYERS) == 16 * 4 * (8 * 2 * 64 + 2 * 2 * 512)
    assert FLOATS.state_bytes(LAYERS) == 4 * (2 * 96 + 4 * 64)


def test_devices_share_heads_and_channels_and_replicate_what_they_cannot():
    on_four = CacheLayout(np.dtype(np.float32), 16, tp=4)
    assert on_four.page_bytes(LAYERS[:1]) == FLOATS.page_bytes(LAYERS[:1]) // 4
    assert on_four.page_bytes(LAYERS[1:2]) == FLOATS.page_bytes(LAYERS[1:2]) // 2, "two heads, each on two devices"
    assert on_four.state_bytes(LAYERS) == FLOATS.state_bytes(LAYERS) // 4
    whole = PerSlot(((3, 5),), (None,))
    assert on_four.state_bytes([whole]) == FLOATS.state_bytes([whole])


def test_quantized_pages_have_a_scale_behind_each_row():
    codes = CacheLayout(np.dtype(np.int8), 16)
    assert codes.page_bytes(LAYERS[:1]) == 16 * 8 * 2 * (64 + 4)


def test_the_layout_of_pages_is_that_of_the_kernels():
    (buffer,) = CacheLayout(np.dtype(np.float32), 16, page_layout=INTERLEAVED).buffers(LAYERS[0], 10, 5)
    assert (buffer.shape, buffer.axes) == ((10, 16, 16, 128), (None, None, TENSOR))


def test_a_layer_of_two_mixers_keeps_what_each_of_them_does():
    both = Joined((LAYERS[2], LAYERS[0]))
    assert FLOATS.buffers(both, 10, 5) == FLOATS.buffers(LAYERS[2], 10, 5) + FLOATS.buffers(LAYERS[0], 10, 5)
    assert FLOATS.state_bytes([both]) == FLOATS.state_bytes(LAYERS)
    assert FLOATS.page_bytes([both]) == FLOATS.page_bytes(LAYERS[:1])
    assert parts_of([both, None, LAYERS[1], Shared(0)]) == [LAYERS[2], LAYERS[0], LAYERS[1]]


@pytest.mark.parametrize(("tp", "channels"), [(1, 90), (3, 90), (6, 90 + 30), (12, 90 + 90)])
def test_channels_of_a_group_are_on_each_device_that_has_a_part_of_it(tp, channels):
    """Of 90 channels 30 belong to three groups."""
    spec = PerSlot(((2, 90),), (1,), (Repeated(30, 3),))
    (buffer,) = CacheLayout(np.dtype(np.float32), 16, tp=tp).buffers(spec, 10, 5)
    assert buffer.shape == (5, 2, channels) and channels % tp == 0


@pytest.mark.parametrize(("budget", "sequences"), [(2000, 32), (660, 32), (659, 16), (200, 8), (30, 1), (-5, 1)])
def test_states_of_running_sequences_take_half_of_the_memory_at_most(budget, sequences):
    assert fewer_sequences(32, budget, 10) == sequences
    assert fewer_sequences(32, budget, 0) == 32


def test_steps_have_a_row_for_each_slot_one_for_padding_and_one_for_each_snapshot():
    sizes = StepSizes(
        max_num_seqs=4, max_num_batched_tokens=32, decode_steps=1, max_model_len=64, page_size=16, num_pages=10,
        num_snapshots=3, caches=LAYERS, cache_layout=FLOATS, hidden_size=8, vocab_size=9, dtype=np.float32,
    )  # fmt: skip
    assert sizes.keeps_by_slot and sizes.num_slot_rows == 8
    assert [len(layer) for layer in sizes.buffers] == [2, 2, 2, 0, 0]
    assert sizes.buffers[2][0].shape == (8, 2, 96)


def share(budget: int, page_bytes: int, state_bytes: int, wanted: int = 160, **fields) -> tuple[int, int, int]:
    config = EngineConfig(**fields)
    found = plan_caches(config, budget, 0, page_bytes, state_bytes, wanted, max_num_seqs=3)
    return found.num_pages, found.num_snapshots, found.max_model_len


def test_states_of_running_sequences_come_first_then_kept_ones_then_pages():
    assert share(240_000, 1000, 1000, 1600) == (204, 30, 1600)  # 4 and 30 of 240 thousand; 206 in six bits are 204
    assert share(240_000, 1000, 1000, 1600, state_cache_memory=10_000) == (224, 10, 1600)
    assert share(240_000, 1000, 1000, 1600, enable_prefix_caching=False) == (236, 0, 1600)


def test_a_model_without_pages_has_as_many_as_all_sequences_can_use():
    assert share(10_000, 0, 100) == (31, 12, 160)


def test_the_same_memory_gives_the_same_sizes_once_more():
    """What an engine reports of itself is what it is started with again."""
    pages, snapshots, length = share(987_654, 1000, 777, wanted=3200)
    again = share(4 * 777 + snapshots * 777 + pages * 1000, 1000, 777, 3200, state_cache_memory=snapshots * 777)
    assert again == (pages, snapshots, length)


def test_too_little_memory_for_a_state_is_said(caplog):
    config = EngineConfig(state_cache_memory=50)
    found = plan_caches(config, 24_000, 0, 1000, 100, 160, 3)
    assert found.num_snapshots == 0 and "no prefix is shared" in found.notes[0]
    with pytest.raises(ConfigError, match=r"does not hold the states of 3 sequences .* lower max_num_seqs"):
        plan_caches(config, 399, 0, 1000, 100, 160, 3)
