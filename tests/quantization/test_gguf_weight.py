"""GGUF blocks as weights: bits against the `gguf` package's decoder, products against NumPy's."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.quantization.gguf_decode import FORMATS, decode
from jaxllm.quantization.gguf_weight import GgufBlocks, GgufKind
from jaxllm.quantization.stored import Stored
from jaxllm.sharding.mesh import Layout, Segment, padded_rows
from tests.quantization.blocks import gguf_dequantize, random_blocks, stored

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_expand_bit_for_bit_as_gguf_does(dtype):
    blocks = random_blocks(dtype, 5, 3)
    found = jax.jit(decode, static_argnums=1)(blocks, dtype)
    np.testing.assert_array_equal(found, gguf_dequantize(blocks, dtype), strict=True)


def test_sizes_are_ggmls():
    for dtype, block in FORMATS.items():
        assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_those_of_the_whole_matrix(dtype):
    blocks = random_blocks(dtype, 7, 2)
    ids = np.array([3, 0, 6, 3])
    rows = GgufBlocks(jnp.asarray(blocks), dtype, FLOAT32).rows(jnp.asarray(ids))
    np.testing.assert_array_equal(rows, gguf_dequantize(blocks, dtype)[ids])


@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_of_a_file_are_kept_byte_for_byte(dtype):
    elements, nbytes, *_ = FORMATS[dtype]
    first, second = random_blocks(dtype, 4, 2), random_blocks(dtype, 3, 2, seed=1)
    tensors = [Stored(b.reshape(-1), dtype, (len(b), 2 * elements), packed=True) for b in (first, second)]
    weight = GgufKind(dtype, FLOAT32).pack(tensors, Layout((Segment(4, 1), Segment(3, 1)), 1))
    np.testing.assert_array_equal(weight.blocks, np.concatenate([first, second]))
    assert weight.shape == (7, 2 * elements)
    assert weight.blocks.nbytes == 7 * 2 * nbytes


@pytest.mark.parametrize("dtype", FORMATS)
def test_padding_rows_are_zeros(dtype):
    blocks = random_blocks(dtype, 5, 1)
    tensor = Stored(blocks.reshape(-1), dtype, (5, FORMATS[dtype].elements), packed=True)
    weight = GgufKind(dtype, FLOAT32).pack([tensor], padded_rows(5, 1))
    assert weight.shape[0] == 64
    assert not gguf_dequantize(weight.blocks, dtype)[5:].any()


def test_scales_that_are_not_finite_are_refused_by_name():
    blocks = random_blocks("Q4_K", 2, 1)
    blocks[1, 0, 2:4] = np.array([np.nan], np.float16).view(np.uint8)
    tensor = Stored(blocks.reshape(-1), "Q4_K", (2, 256), packed=True, origin="file: tensor 'w'")
    with pytest.raises(CheckpointError, match=r"^file: tensor 'w': not all scales of its Q4_K blocks are finite$"):
        GgufKind("Q4_K", FLOAT32).pack([tensor], None)


def test_numbers_that_are_not_finite_cannot_be_quantized():
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = np.inf
    tensor = stored(values)._replace(origin="file: tensor 'w'")
    with pytest.raises(CheckpointError, match=r"^file: tensor 'w': not all numbers are finite"):
        GgufKind("Q8_0", FLOAT32).pack([tensor], None)
