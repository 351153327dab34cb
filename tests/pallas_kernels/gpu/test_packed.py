"""Products with weights of few bits in tiles, interpreted or on a GPU, against float64 NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.layers.mlp import ACTIVATIONS
from jaxllm.pallas_kernels import LATER, late_sum
from jaxllm.pallas_kernels.gpu import packed
from jaxllm.pallas_kernels.gpu.matmul import choose_tile_rows
from jaxllm.pallas_kernels.gpu.packed import grouped_matmul, late_matmul
from jaxllm.pallas_kernels.gpu.products import linear
from jaxllm.pallas_kernels.gpu.route import list_rows
from jaxllm.pallas_kernels.gpu.walk import Tiling
from jaxllm.pallas_kernels.matrices import E2M1, PackedMatrix
from jaxllm.quantization.coded import groups
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.gpu_tiles import BLOCKS, GpuTiles, gpu_tiled
from jaxllm.quantization.stored import E8M0, FP8, Stored
from jaxllm.quantization.weight import fuse
from tests.quantization.blocks import nvfp4
from tests.support.gpu_here import INTERPRET

pytestmark = pytest.mark.hardware

F32 = np.dtype(np.float32)
BF16 = np.dtype(jnp.bfloat16)
KINDS: dict[str, Any] = {
    **{type_: lambda dtype, type_=type_: GgufKind(type_, dtype) for type_ in BLOCKS},
    "2 bits": lambda dtype: groups(dtype, 2),
    "4 bits": lambda dtype: groups(dtype),
    "4 bits, symmetric": lambda dtype: groups(dtype, 4, 32, True),
    "4 bits by 128": lambda dtype: groups(dtype, 4, 128, False, F32),
    "4 bits by 16, bfloat16 scales": lambda dtype: groups(dtype, 4, 16, True, BF16),
    "MXFP4": lambda dtype: groups(dtype, 4, 32, True, E8M0, E2M1),
    "NVFP4": lambda dtype: groups(dtype, 4, 16, True, FP8, E2M1),
    "8 bits": lambda dtype: groups(dtype, 8, 64),
    "8 bits, symmetric": lambda dtype: groups(dtype, 8, 32, True),
}


def tiles(name: str, *shape: int, dtype: np.dtype = F32) -> tuple[GpuTiles, np.ndarray]:
    """A weight of random codes, and the numbers that it stands for as the kind that it is made of expands them."""
    kind = KINDS[name](dtype)
    values = np.random.default_rng().standard_normal(shape).astype(np.float32)
    tensors = [nvfp4(*shape) if name == "NVFP4" else Stored(values, "F32", values.shape)]
    tiled = gpu_tiled(kind, [shape[-2]], shape[-1])
    assert tiled is not kind
    kept = kind.pack(tensors, None)
    exact = jax.tree.map(jnp.asarray, replace(kept, dtype=F32)).dequantize()
    return jax.tree.map(jnp.asarray, tiled.pack(tensors, None)), np.asarray(exact, np.float64)


def matmul(x: jax.Array, matrix: PackedMatrix, **options: Any) -> jax.Array:
    return late_sum(late_matmul(x, [matrix], interpret=INTERPRET, **options))


def draw(rows: int, inputs: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng().standard_normal((rows, inputs)), dtype)


def assert_near(found: Any, expected: np.ndarray, error: float) -> None:
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= error * np.abs(expected).max()


@pytest.mark.parametrize("name", KINDS)
def test_few_rows(name: str) -> None:
    """More outputs than a program has, the last not whole; sums in float32 of numbers that nothing rounds."""
    weight, exact = tiles(name, 80, 512)
    (matrix,) = weight.kernel_matrices
    for rows in np.random.default_rng().choice(np.arange(1, 17), 2, replace=False):
        x = draw(rows, 512, F32)
        assert_near(matmul(x, matrix), np.asarray(x, np.float64) @ exact.T, 3e-6)


RAGGED = {
    "Q4_0": (2336, 96),
    "Q4_1": (1696, 352),
    "Q5_0": (704, 896, 992),
    "Q5_1": (1408, 704, 352, 2912),
    "Q8_0": (1120,),
    "2 bits": (2144, 160),
    "4 bits": (1696, 96),
    "4 bits, symmetric": (1696, 224),
    "4 bits by 16, bfloat16 scales": (2352, 304),
    "MXFP4": (1696, 288),
    "NVFP4": (2112, 320),
    "8 bits": (448,),
}
"""By kind: numbers of inputs that are no whole tiles of the usual width, nor of half of it, or no pairs of scales."""


@pytest.mark.parametrize(("name", "inputs"), [(name, size) for name, sizes in RAGGED.items() for size in sizes])
def test_rows_end_within_a_tile(name: str, inputs: int) -> None:
    """Few rows, in one part or two, and with weights that are scaled first."""
    weight, exact = tiles(name, 80, inputs)
    (matrix,) = weight.kernel_matrices
    assert matrix.shape == exact.shape
    random = np.random.default_rng()
    for rows in (int(random.integers(1, 17)), 40):
        x = draw(rows, inputs, F32)
        assert_near(matmul(x, matrix), np.asarray(x, np.float64) @ exact.T, 3e-6)


@pytest.mark.parametrize(("name", "inputs"), [("Q5_1", 704), ("Q5_0", 352), ("Q4_0", 1632)])
def test_rows_that_end_within_a_tile_are_expanded_exactly(name: str, inputs: int) -> None:
    weight, _ = tiles(name, 48, inputs, dtype=BF16)
    expected = np.asarray(weight.dequantize(), np.float32)
    found = packed.expand_tiles(weight, 0, 3, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
    x = draw(300, inputs, jnp.bfloat16)
    assert_near(matmul(x, weight), np.asarray(x, np.float64) @ expected.astype(np.float64).T, 3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "Q5_1", "Q3_K", "8 bits", "4 bits", "MXFP4", "NVFP4"])
def test_codes_are_exact_in_16_bits(name: str, dtype: Any) -> None:
    weight, exact = tiles(name, 32, 256, dtype=np.dtype(dtype))
    x = draw(7, 256, dtype)
    assert_near(matmul(x, weight), np.asarray(x, np.float64) @ exact.T, 3e-6)


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(1, 2, 128, 2, least=256),
        Tiling(2, 3, 256, 3, least=512, ahead=False),
        Tiling(4, 1, 1024, 2, scaled=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_K"])
def test_every_way_to_cut_it_gives_the_same(name: str, tiling: Tiling) -> None:
    """Parts of rows, the last with fewer steps; several tiles a program, some of them after the last."""
    weight, exact = tiles(name, 112, 768)
    x = draw(3, 768, F32)
    found = matmul(x, weight, tiling=tiling)
    assert_near(found, np.asarray(x, np.float64) @ exact.T, 3e-6)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("Q4_0", 131),
        ("Q4_0", 300),
        ("Q4_K", 40),
        ("Q4_K", 131),
        ("Q6_K", 70),
        ("4 bits", 131),
        ("8 bits, symmetric", 40),
    ],
)
def test_many_rows(name: str, rows: int) -> None:
    """Expanded for each tile of rows, and hundreds of them in memory."""
    weight, exact = tiles(name, 144, 256)
    x = draw(rows, 256, F32)
    found = linear(x, weight, residual=jnp.ones((rows, 144)), interpret=INTERPRET)
    assert_near(found, np.asarray(x, np.float64) @ exact.T + 1, 3e-6)


@pytest.mark.parametrize("rows", [3, 40, 300])
@pytest.mark.parametrize(
    ("names", "inputs"), [((("Q4_K", 80), ("Q4_0", 16), ("Q6_K", 48)), 512), ((("Q5_0", 80), ("Q8_0", 16)), 896)]
)
def test_matrices_of_several_formats_are_one_product(
    names: tuple[tuple[str, int], ...], inputs: int, rows: int
) -> None:
    """As queries, keys and values of a file are: each with its own blocks, the last of each not whole."""
    made = [tiles(name, outputs, inputs) for name, outputs in names]
    weight, exact = fuse([weight for weight, _ in made]), np.concatenate([exact for _, exact in made])
    x = draw(rows, inputs, F32)
    expected = np.asarray(x, np.float64) @ exact.T
    assert_near(linear(x, weight, interpret=INTERPRET), expected, 3e-6)
    assert_near(late_sum(linear(x, weight, residual=LATER, interpret=INTERPRET)), expected, 3e-6)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "4 bits by 128", "MXFP4"])
def test_what_is_expanded_in_memory_is_expanded_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit in the model's type; and in parts, the last smaller."""
    weight, _ = tiles(name, 112, 512, dtype=BF16)
    expected = np.asarray(weight.dequantize(), np.float32)
    found = packed.expand_tiles(weight, 2, 5, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected[32:])
    monkeypatch.setattr(packed, "EXPANDED_BYTES", 3 * 16 * 512 * 2)
    x = draw(300, 512, jnp.bfloat16)
    out = matmul(x, weight)
    assert_near(out, np.asarray(x, np.float64) @ expected.astype(np.float64).T, 3e-6)


@pytest.mark.parametrize(
    ("name", "rows", "share", "inputs"),
    [
        ("Q4_0", 24, 2, 256),
        ("Q4_K", 24, 2, 256),
        ("4 bits", 72, 1, 256),
        ("Q4_0", 264, 1, 256),
        ("Q5_1", 24, 2, 704),
        ("Q5_0", 24, 1, 352),
        ("Q5_1", 264, 1, 704),
        ("4 bits", 72, 1, 96),
    ],
)
def test_experts(name: str, rows: int, share: int, inputs: int) -> None:
    """Rows of each expert anywhere, with the activation and without; those of no expert are NaN, one has none."""
    weight, exact = tiles(name, 3, 64, inputs)
    random = np.random.default_rng()
    group = random.permutation(np.repeat([0, 2, 3], [rows // 2, rows // 2 - 1, 1]))
    x = random.standard_normal((rows // share, inputs)).astype(np.float32)
    nobody = group == 3
    x[nobody.reshape(-1, share).all(axis=1)] = np.nan
    tile_rows = choose_tile_rows(rows, 3)
    lists = list_rows(jnp.asarray(group, jnp.int32), 3, rows, tile_rows, interpret=INTERPRET)
    expected = np.einsum("noi,ni->no", exact[np.minimum(group, 2)], np.repeat(x, share, axis=0).astype(np.float64))
    gate, up = np.split(expected, 2, axis=1)
    for activation, wanted in ((None, expected), (ACTIVATIONS["silu"], gate / (1 + np.exp(-gate)) * up)):
        options: dict[str, Any] = {"activation": activation, "interpret": INTERPRET}
        found = grouped_matmul(jnp.asarray(x), weight, lists, rows, tile_rows, **options)
        assert_near(np.asarray(found)[~nobody], wanted[~nobody], 1e-5)
