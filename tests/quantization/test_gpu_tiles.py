"""Weights in the tiles of GPU kernels: bit for bit the numbers of the file."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.quantization.coded import CodedKind, groups
from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.gpu_tiles import BLOCKS, GpuTiles, gpu_tiled, group_format
from jaxllm.quantization.stored import E8M0, FP8, Coding, Stored
from jaxllm.sharding.mesh import Layout, Segment
from tests.quantization.blocks import nvfp4

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def random_blocks(type_: str, rows: int, inputs: int) -> np.ndarray:
    """Every bit at random, but for scales, which are finite."""
    random = np.random.default_rng()
    elements, nbytes, _, _, scales, *_ = FORMATS[type_]
    blocks = random.integers(0, 256, (rows, inputs // elements, nbytes), np.uint8)
    for start in scales:
        blocks[..., start : start + 2] = random.normal(size=blocks.shape[:-1]).astype(F16)[..., None].view(np.uint8)
    if type_ == "MXFP4":
        blocks[..., 0] = random.integers(4, 250, blocks.shape[:-1])  # whose products are normal floats
    return blocks


def packed(type_: str, blocks: np.ndarray, layout: Layout | None = None, tp: int = 1) -> GpuTiles:
    rows, inputs = blocks.shape[0], blocks.shape[1] * FORMATS[type_].elements
    kind = gpu_tiled(GgufKind(type_, F32), [rows], inputs // tp)
    stored = Stored(blocks.reshape(rows, -1), type_, (rows, inputs), packed=True)
    kept = kind.pack([stored], layout)
    assert jax.tree.map(lambda array: (array.shape, array.dtype), kept) == jax.tree.map(
        lambda array: (array.shape, array.dtype), kind.abstract((rows, inputs))
    )
    return jax.tree.map(jnp.asarray, kept)


@pytest.mark.parametrize("type_", BLOCKS)
def test_tiles_hold_the_file_bit_for_bit(type_: str) -> None:
    """As the gguf package decodes it; in as many bytes as the file has."""
    blocks = random_blocks(type_, 48, 1024)
    exact = gguf.quants.dequantize(blocks.reshape(48, -1), gguf.GGMLQuantizationType[type_])
    weight = packed(type_, blocks)
    assert weight.shape == (48, 1024)
    np.testing.assert_array_equal(np.asarray(weight.dequantize()), exact)
    ids = np.random.default_rng().integers(0, 48, 5)
    np.testing.assert_array_equal(np.asarray(weight.rows(jnp.asarray(ids))), exact[ids])
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) == blocks.nbytes


@pytest.mark.parametrize("inputs", [1408, 704, 896, 352, 288, 96])
@pytest.mark.parametrize("type_", [name for name in BLOCKS if FORMATS[name].elements == 32])
def test_tiles_hold_any_number_of_blocks(type_: str, inputs: int) -> None:
    """Those after a row's end hold nothing, and add little to rows that are not short."""
    blocks = random_blocks(type_, 32, inputs)
    exact = gguf.quants.dequantize(blocks.reshape(32, -1), gguf.GGMLQuantizationType[type_])
    weight = packed(type_, blocks)
    assert weight.shape == (32, inputs)
    np.testing.assert_array_equal(np.asarray(weight.dequantize()), exact)
    np.testing.assert_array_equal(np.asarray(weight.rows(jnp.asarray([17, 3]))), exact[[17, 3]])
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) <= (1.02 if inputs >= 352 else 1.2) * blocks.nbytes


GROUPS = (
    groups(F32, 2),
    groups(F32, 4),
    groups(F32, 4, 32, True),
    groups(F32, 4, 128, False, F32),
    groups(F32, 4, 512, True),
    groups(F32, 4, 32, True, E8M0, E2M1),
    groups(F32, 8, 64),
    groups(F32, 8, 48, True),
)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [(kind, inputs) for kind in GROUPS for inputs in (1536, 4704, 352) if inputs % kind.block == 0],
    ids=str,
)
def test_groups_are_the_same_in_tiles(kind: CodedKind, inputs: int) -> None:
    values = np.random.default_rng().standard_normal((2, 32, inputs)).astype(np.float32)
    tensors = [Stored(values, "F32", values.shape)]
    plain = jax.tree.map(jnp.asarray, kind.pack(tensors, None))
    tiled = jax.tree.map(jnp.asarray, gpu_tiled(kind, [32], inputs).pack(tensors, None))
    np.testing.assert_array_equal(np.asarray(tiled.dequantize()), np.asarray(plain.dequantize()))
    here, there = (sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) for weight in (tiled, plain))
    assert here <= (1.02 if inputs >= 1536 else 1.07) * there
    one = tiled.select(jnp.asarray(1))
    np.testing.assert_array_equal(np.asarray(one.dequantize()), np.asarray(plain.dequantize())[1])
    x = jnp.ones((3, inputs))
    np.testing.assert_allclose(one.matmul(x), one.dequantize().sum(1)[None].repeat(3, 0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("type_", ["IQ4_NL", "IQ4_XS"])
def test_levels_of_blocks_are_codes_for_the_kernels(type_: str) -> None:
    blocks = random_blocks(type_, 24, 512)
    stored = Stored(blocks.reshape(24, -1), type_, (24, 512), packed=True)
    kind = gpu_tiled(GgufKind(type_, F32), [24], 512)
    kept = kind.pack([stored], None)
    abstract = jax.tree.map(lambda array: (array.shape, array.dtype), (kept, kind.abstract((24, 512))))
    kept = jax.tree.map(jnp.asarray, kept)
    assert abstract[0] == abstract[1] and kept.kernel_matrices is not None
    exact = gguf.quants.dequantize(blocks.reshape(24, -1), gguf.GGMLQuantizationType[type_])
    np.testing.assert_array_equal(np.asarray(kept.dequantize()), exact)


@pytest.mark.parametrize("shape", [(32, 512), (2, 48, 192)])
def test_nvfp4_is_the_same_in_tiles(shape: tuple[int, ...]) -> None:
    """Against float64: levels, scales of eight bits and each row's factor."""
    tensor = nvfp4(*shape)
    kind = groups(F32, 4, 16, True, FP8, E2M1)
    plain, tiled = (
        jax.tree.map(jnp.asarray, each.pack([tensor], None)) for each in (kind, gpu_tiled(kind, [shape[-2]], shape[-1]))
    )
    assert tensor.codes is not None and tensor.codes.factor is not None
    scale = np.repeat(tensor.codes.scale.astype(np.float64), 16, axis=-1) * tensor.codes.factor[..., None]
    np.testing.assert_allclose(np.asarray(plain.dequantize()), np.asarray(E2M1)[tensor.data] * scale, rtol=2e-7)
    np.testing.assert_array_equal(np.asarray(tiled.dequantize()), np.asarray(plain.dequantize()))
    np.testing.assert_array_equal(tensor.expand(), np.asarray(plain.dequantize()))
    leaves = sum(leaf.nbytes for leaf in jax.tree.leaves(plain)), sum(leaf.nbytes for leaf in jax.tree.leaves(tiled))
    assert leaves == (tensor.data.size * 9 // 16 + 4 * scale[..., 0].size, tensor.data.size * 5 // 8)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("type_", "inputs"), [("Q4_K", 1024), ("Q5_1", 1408), ("Q4_0", 576)])
def test_a_devices_part_is_whole_tiles(type_: str, inputs: int, tp: int) -> None:
    """Of outputs, which the layout deals out, and of inputs."""
    blocks = random_blocks(type_, 64, inputs)
    exact = gguf.quants.dequantize(blocks.reshape(64, -1), gguf.GGMLQuantizationType[type_])
    layout = Layout((Segment(64, tp),), tp)
    weight = packed(type_, blocks, layout, tp)
    for leaf, axes in zip(jax.tree.leaves(weight), weight.axes(("rows", "inputs")), strict=True):
        assert leaf.ndim == len(axes) and leaf.shape[0] % tp == 0 and leaf.shape[1] % tp == 0
    parts = [jax.tree.map(lambda leaf, at=at: np.split(leaf, tp, 1)[at], weight) for at in range(tp)]
    found = np.concatenate([np.asarray(part.dequantize()) for part in parts], axis=1)
    np.testing.assert_array_equal(found, exact)


def test_what_does_not_fit_stays_as_it_is() -> None:
    kind = GgufKind("Q4_0", F32)
    assert gpu_tiled(kind, [16, 48], 64) is not kind
    assert gpu_tiled(kind, [16, 24], 64) is kind
    assert gpu_tiled(kind, [16], 80) is kind
    k_kind = GgufKind("Q4_K", F32)
    assert gpu_tiled(k_kind, [16], 128) is k_kind
    levels = groups(F32, 4, 32, True, levels=tuple(map(float, range(16))))
    assert gpu_tiled(levels, [16], 64) is levels
    assert group_format(Coding(4, (1, 8), F16), inputs=64) is None
