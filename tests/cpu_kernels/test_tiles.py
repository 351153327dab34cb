"""Repacking against the gguf package's decoder."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from jaxllm import cpu_kernels
from tests.cpu_kernels.weights import FORMATS, QUANTIZED, needs_kernels, random_weights

pytestmark = needs_kernels


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_unpacking_gives_what_the_checkpoint_meant_to_the_last_bit(format, rows):
    weights = random_weights(format, rows, 768)
    unpacked = cpu_kernels.unpack(format, weights.tiles.tiles, rows, scales=weights.tiles.scales)
    np.testing.assert_array_equal(unpacked, weights.values.astype(np.float32))


@pytest.mark.parametrize("format", QUANTIZED)
def test_tiles_take_hardly_more_memory_than_the_checkpoint(format):
    weights = random_weights(format, 32, 512)
    assert weights.tiles.tiles.nbytes <= 1.03 * weights.blocks.nbytes
    assert weights.tiles.tiles.shape == (2, 512 // cpu_kernels.tile_inputs(format), cpu_kernels.tile_bytes(format))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_there_are_zero(format):
    weights = random_weights(format, 19, 256)
    unpacked = cpu_kernels.unpack(format, weights.tiles.tiles, 32, scales=weights.tiles.scales)
    np.testing.assert_array_equal(unpacked[19:], 0)


def test_float_inputs_that_no_block_holds_are_padded():
    weights = random_weights("bf16", 5, 50)
    assert weights.tiles.tiles.shape[1] == 2
    np.testing.assert_array_equal(cpu_kernels.unpack("bf16", weights.tiles.tiles, 5, 50), weights.values)


def test_names_are_taken_in_ggufs_spelling():
    blocks = random_weights("q4_k", 16, 256).blocks
    np.testing.assert_array_equal(cpu_kernels.repack("Q4_K", blocks), cpu_kernels.repack("q4_k", blocks))


def test_what_does_not_fit_is_refused():
    blocks = random_weights("q4_0", 16, 64).blocks
    with pytest.raises(ValueError, match="'q2_k'; there are tiles of q4_0, "):
        cpu_kernels.repack("q2_k", blocks)
    with pytest.raises(ValueError, match=r"uint8 \[16, 2, 18\]; q8_0 takes uint8 \[o, blocks, 34\]"):
        cpu_kernels.repack("q8_0", blocks)
    with pytest.raises(ValueError, match=r"do not hold \[17, 64\]"):
        cpu_kernels.unpack("q4_0", cpu_kernels.repack("q4_0", blocks), 17)


def test_scales_of_every_half():
    """Among them subnormal ones."""
    halves = np.arange(0x7C00, dtype=np.uint16)[: 31 * 1024]
    blocks = np.full((len(halves), 1, 18), 0x99, np.uint8)
    blocks[:, 0, :2] = halves.view(np.uint8).reshape(-1, 2)
    expected = gguf.quants.dequantize(blocks.reshape(len(halves), -1), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(cpu_kernels.unpack("q4_0", cpu_kernels.repack("q4_0", blocks), len(halves)), expected)
