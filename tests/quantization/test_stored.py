import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import dequantize


@pytest.mark.parametrize("dtype", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.MXFP4])
def test_types_of_blocks_go_through_gguf(dtype):
    packed = np.random.default_rng(0).integers(0, 64, (4, gguf.GGML_QUANT_SIZES[dtype][1] * 2), np.uint8)
    expected = gguf.quants.dequantize(packed, dtype)
    np.testing.assert_array_equal(dequantize(packed.reshape(-1), dtype.name, expected.shape), expected, strict=True)


@pytest.mark.parametrize(
    ("dtype", "nbytes", "shape"), [("Q4_0", 17, (32,)), ("Q4_0", 18, (31,)), ("I32", 8, (2,)), ("?", 8, (2,))]
)
def test_wrong_sizes_and_types_are_refused(dtype, nbytes, shape):
    with pytest.raises(CheckpointError, match=r"are no Q4_0 tensor|cannot be dequantized"):
        dequantize(np.zeros(nbytes, np.uint8), dtype, shape)
