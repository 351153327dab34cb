"""FP8 weights with a scale for each block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.quantization import weight as weights
from jaxllm.quantization.coded import Coded, CodedKind, fp8_blocks
from jaxllm.quantization.stored import FP8, Codes, Coding, Stored
from jaxllm.sharding.mesh import Layout, Segment

FLOAT32 = np.dtype(np.float32)


def fp8_tensor(shape: tuple[int, ...], block: tuple[int, int], seed: int = 1) -> Stored:
    rng = np.random.default_rng(seed)
    codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    blocks = (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=True)))
    scale = rng.uniform(0.1, 3, size=blocks).astype(np.float32)
    return Stored(codes, "FP8", shape, codes=Codes(Coding(8, block, FLOAT32, codes=FP8), scale))


def packed(tensors: list[Stored], kind: CodedKind, layout: Layout | None = None) -> Coded:
    return jax.tree.map(jnp.asarray, kind.pack(tensors, layout))


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1), (3, 13)])
def test_every_element_takes_the_scale_of_its_block(shape):
    tensor = fp8_tensor(shape, (2, 3))
    out = tensor.expand()
    assert out.dtype == np.float32
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected = np.float32(tensor.data[row, column]) * tensor.codes.scale[row // 2, column // 3]
            assert out[row, column] == expected


@pytest.mark.parametrize("tile", [1, 100, 1 << 20])
def test_products_and_rows_of_ragged_blocks(tile, monkeypatch):
    """Blocks of 8 x 6 over 20 x 16: kept in blocks of 4 x 2, some at a time."""
    monkeypatch.setattr(weights, "TILE", tile)
    tensor, x = fp8_tensor((20, 16), (8, 6)), np.random.default_rng(2).normal(size=(3, 16)).astype(np.float32)
    weight = packed([tensor], fp8_blocks(FLOAT32, 4, 2))
    np.testing.assert_allclose(
        jax.jit(lambda w, x: w.matmul(x))(weight, x), x @ tensor.expand().T, rtol=1e-5, atol=1e-5
    )
    ids = np.array([19, 0, 7, 7])
    np.testing.assert_array_equal(weight.rows(jnp.asarray(ids)), tensor.expand()[ids])


def test_blocks_of_rows_are_laid_out_for_devices():
    """Two devices, two segments: each device has half of both."""
    tensors = [fp8_tensor((16, 12), (4, 4), seed) for seed in (0, 1)]
    layout = Layout((Segment(16, 2), Segment(16, 2)), 2)
    weight = packed(tensors, fp8_blocks(FLOAT32, 4, 4), layout)
    first, second = (tensor.expand() for tensor in tensors)
    np.testing.assert_array_equal(weight.dequantize(), np.concatenate([first[:8], second[:8], first[8:], second[8:]]))


def test_a_padded_embedding_has_rows_of_zeros():
    tensor = fp8_tensor((6, 4), (4, 4))
    weight = packed([tensor], fp8_blocks(FLOAT32, 2, 4), Layout((Segment(6, 1),), 1, pad_to=8))
    np.testing.assert_array_equal(weight.dequantize(), np.pad(tensor.expand(), [(0, 2), (0, 0)]))


def test_a_matrix_of_a_stack_is_taken_with_its_scales():
    tensor = fp8_tensor((3, 8, 4), (4, 2))
    weight = packed([tensor], fp8_blocks(FLOAT32, 4, 2))
    np.testing.assert_array_equal(weight.select(jnp.int32(2)).dequantize(), tensor.expand()[2])
