import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.errors import CheckpointError
from jaxllm.quantization import gguf_blocks
from jaxllm.quantization.gguf_blocks import BLOCK_FORMATS, dequantize

# Where the float16 scales of a block lie; every other byte may be anything.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_FORMATS[dtype].nbytes), dtype=np.uint8)
    for offset in SCALES[dtype]:
        blocks[:, offset : offset + 2] = rng.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("dtype", sorted(BLOCK_FORMATS))
def test_random_blocks_expand_bit_for_bit_as_gguf_does(dtype, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 8192)  # several chunks, the last one short
    blocks = random_blocks(dtype, 3 * 37)
    expected = gguf.quants.dequantize(blocks.reshape(3, -1), GGMLQuantizationType[dtype])
    found = dequantize(blocks.reshape(-1), dtype, expected.shape)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_sizes_are_ggmls():
    for dtype, block in BLOCK_FORMATS.items():
        assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]


def test_other_types_go_through_gguf():
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, GGMLQuantizationType.MXFP4)
    expected = gguf.quants.dequantize(packed, GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(dequantize(packed.reshape(-1), "MXFP4", (4, 64)), expected)


@pytest.mark.parametrize(
    ("dtype", "nbytes", "shape"), [("Q4_0", 17, (32,)), ("Q4_0", 18, (31,)), ("I32", 8, (2,)), ("?", 8, (2,))]
)
def test_wrong_sizes_and_types_are_refused(dtype, nbytes, shape):
    with pytest.raises(CheckpointError, match=r"are no Q4_0 tensor|cannot be dequantized"):
        dequantize(np.zeros(nbytes, np.uint8), dtype, shape)
