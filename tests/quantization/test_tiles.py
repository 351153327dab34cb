"""Weights in the C++ kernels' tiles are, to the bit, what the kinds that they hold keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.errors import CheckpointError
from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.quantization.coded import fp8_blocks, groups, per_channel
from jaxllm.quantization.schemes import SCHEMES, coded_kind
from jaxllm.quantization.stored import FP8, INT8, UINT8, Codes, Coding, Stored
from jaxllm.quantization.tiles import TiledKind, tile_format, tiled
from jaxllm.quantization.weight import DenseKind, WeightKind
from jaxllm.sharding.mesh import Layout, Segment
from tests.quantization.blocks import nvfp4, stored

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason=cpu_kernels.reason() or "available")

BF16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
KINDS: dict[str, WeightKind] = {
    "int8": per_channel(INT8, FLOAT32),
    "w8a8": per_channel(INT8, FLOAT32, activations=True),
    "fp8": per_channel(FP8, FLOAT32),
    "int4": groups(FLOAT32),
    "int4 symmetric": groups(FLOAT32, symmetric=True),
}


def random_values(*shape: int) -> Stored:
    return stored(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))


def assert_holds(kind: WeightKind, tensors: list[Stored]) -> None:
    in_tiles = TiledKind(kind)  # type: ignore[arg-type]
    weight, kept = (jax.tree.map(jnp.asarray, each.pack(tensors, None)) for each in (in_tiles, kind))
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), (weight, in_tiles.abstract(kept.shape)))
    assert shapes[0] == shapes[1]
    assert len(weight.axes((None,) * len(kept.shape))) == len(jax.tree.leaves(weight))
    np.testing.assert_array_equal(weight.dequantize(), kept.dequantize())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(16, 32), (48, 160), (3, 32, 96)])
def test_tiles_hold_the_same_numbers(name, shape):
    assert_holds(KINDS[name], [random_values(*shape)])


@pytest.mark.parametrize("rows", [4, 16, 48])
@pytest.mark.parametrize("run", [32, 64, 192])
def test_blocks_of_fp8_keep_their_scales(rows, run):
    assert_holds(fp8_blocks(FLOAT32, rows, run), [fp8_tensor((48, 192), (rows, run))])


@pytest.mark.parametrize("shape", [(16, 32), (48, 160), (3, 32, 96)])
def test_nvfp4_keeps_its_scales(shape):
    assert_holds(groups(FLOAT32, 4, 16, True, FP8, E2M1), [nvfp4(*shape)])


def fp8_tensor(shape: tuple[int, int], block: tuple[int, int]) -> Stored:
    rng = np.random.default_rng(1)
    codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 3, (shape[0] // block[0], shape[1] // block[1])).astype(np.float32)
    return Stored(codes, "FP8", shape, codes=Codes(Coding(8, block, FLOAT32, codes=FP8), scale), origin="layer.weight")


def test_nan_is_refused():
    tensor = fp8_tensor((16, 64), (16, 32))
    tensor.data[3, 7] = np.nan
    with pytest.raises(CheckpointError, match=r"layer\.weight: holds NaN"):
        TiledKind(fp8_blocks(FLOAT32, 16, 32)).pack([tensor], None)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group", [32, 128])
def test_zero_points_of_checkpoints_are_kept_as_they_are(bits, group):
    """As AWQ and GPTQ have them: codes, their zero and a float16."""
    rng = np.random.default_rng(bits)
    coding = Coding(bits, (1, group), np.dtype(np.float16), symmetric=False)
    scale = rng.uniform(-0.1, 0.1, (32, 256 // group)).astype(np.float16)
    codes = Codes(coding, scale, rng.integers(0, 2**bits + 1, scale.shape, UINT8))
    tensor = Stored(rng.integers(0, 2**bits, (32, 256), UINT8), "GPTQ", (32, 256), codes=codes)
    kind = tiled(coded_kind(coding, BF16, [32], 256, blocks=True), [32], 256, stack=False)
    assert isinstance(kind, TiledKind)
    weight = jax.tree.map(jnp.asarray, kind.pack([tensor], None))
    np.testing.assert_array_equal(weight.rows(jnp.arange(32)), tensor.expand())
    if bits == 4:
        assert weight.tiles.nbytes == 32 * 256 * 4.75 / 8


def test_every_scheme_has_tiles_but_for_those_without_a_kernel():
    without = {name for name, make in SCHEMES.items() if tile_format(make(BF16)) is None}
    assert without == {"q2k", "q3k"}
    assert tile_format(DenseKind(BF16)) == "bf16"
    assert tile_format(groups(BF16, block=64)) is None  # its halves of bytes lie otherwise
    assert tile_format(fp8_blocks(BF16, 16, 48)) is None


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_products(name):
    """Against float64; of integers, up to what eight bits of the inputs leave out."""
    kind, tensor = TiledKind(KINDS[name]), random_values(64, 256)
    weight = jax.tree.map(jnp.asarray, kind.pack([tensor], None))
    for rows in (1, 2, 17):
        x = np.random.default_rng(rows).normal(size=(rows, 256)).astype(np.float32)
        exact = x.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
        error = np.linalg.norm(np.asarray(weight.matmul(jnp.asarray(x))) - exact) / np.linalg.norm(exact)
        assert error < (1e-6 if name == "fp8" else 0.01)


def test_scales_are_divided_as_rows_and_runs_are():
    shape = (32, 128)
    channel = TiledKind(per_channel(INT8, BF16)).abstract(shape)
    assert channel.axes(("tensor", None)) == [("tensor", None, None), ("tensor", None, None)]
    assert channel.axes((None, "tensor")) == [(None, "tensor", None), (None, None, None)]
    blocks = TiledKind(fp8_blocks(BF16, 16, 64)).abstract(shape)
    assert blocks.axes((None, "tensor")) == [(None, "tensor", None), (None, "tensor", None)]


def test_routers_lie_in_tiles_of_float32_and_quantized_weights_of_that_dtype_do_not():
    kind = tiled(DenseKind(FLOAT32), [128], 64, stack=False)
    assert isinstance(kind, TiledKind) and kind.format == "f32"
    weights, x = random_values(128, 64), np.random.default_rng(3).normal(size=(5, 64)).astype(np.float32)
    weight = jax.tree.map(jnp.asarray, kind.pack([weights], None))
    exact = x.astype(np.float64) @ np.asarray(weights.data, np.float64).T
    np.testing.assert_allclose(jax.jit(weight.matmul)(x), exact, rtol=1e-5, atol=1e-5)
    for other, rows in ((DenseKind(FLOAT32), [24]), (SCHEMES["q8_0"](FLOAT32), [128])):
        assert tiled(other, rows, 64, stack=False) == other


@pytest.mark.parametrize("stack", [(), (3,)])
def test_segments_are_packed_where_joined_ones_would_lie(stack):
    layout = Layout((Segment(32, 1), Segment(16, 1)), 1, axis=len(stack))
    parts = [random_values(*stack, rows, 64) for rows in (32, 16)]
    whole = stored(np.concatenate([part.data for part in parts], len(stack)))
    kind = TiledKind(DenseKind(BF16), joins=True)
    jax.tree.map(np.testing.assert_array_equal, kind.pack(parts, layout), kind.pack([whole], None))
