"""Matrix products against float64 NumPy, with every instruction set that this machine has."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import RowNorm, Tiles
from tests.cpu_kernels.weights import (
    CODED,
    FORMATS,
    ISAS,
    QUANTIZED,
    assert_close,
    needs_bf16,
    needs_kernels,
    random_weights,
    rounded,
)

pytestmark = needs_kernels

every_isa = pytest.mark.parametrize("isa", ISAS)
every_format = pytest.mark.parametrize("format", FORMATS)


@functools.partial(jax.jit, static_argnames=("formats", "rows", "epsilon", "offset", "in_bf16"))
def products(x, arrays, norm=None, residual=None, *, formats, rows, epsilon=1e-6, offset=0.0, in_bf16=False):
    weights = [Tiles(tiles, *of, scales, in_bf16) for (tiles, scales), *of in zip(arrays, formats, rows, strict=True)]
    norm = None if norm is None else RowNorm(norm, epsilon, offset)
    return cpu_kernels.linears(x, weights, norm=norm, residual=residual)


def product(x, weights: Tiles, **options):
    [y] = products(x, ((weights.tiles, weights.scales),), formats=(weights.format,), rows=(weights.rows,), **options)
    return np.asarray(y)


def activations(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Blocks of very different size, and one of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)) * np.exp(rng.normal(size=(rows, 1)) * 2)
    x[0, :32] = 0
    return x.astype(np.float32)


@every_format
def test_products(format):
    weights = random_weights(format, 45, 512)
    for rows, isa in itertools.product((1, 2, 7, 15, 16, 17, 65), ISAS):
        x = activations(rows, 512)
        with cpu_kernels.forced(isa):
            y = product(x, weights.tiles)
        assert y.dtype == np.float32
        assert_close(y, rounded(x, format, isa), weights.values)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed):
    rng = np.random.default_rng(seed)
    format = FORMATS[rng.integers(len(FORMATS))]
    inputs = 256 * int(rng.integers(1, 5))
    weights = random_weights(format, int(rng.integers(1, 200)), inputs, seed)
    x = activations(int(rng.integers(1, 150)), inputs, seed)
    for isa in ISAS:
        with cpu_kernels.forced(isa, threads=1 + seed % 4):
            y = product(x, weights.tiles)
        assert_close(y, rounded(x, format, isa), weights.values)


@every_isa
@pytest.mark.parametrize("format", [*QUANTIZED, *CODED])
def test_products_in_bf16(isa, format):
    """Weights and inputs are rounded to bfloat16. i8 and nvfp4 are exact in it, and e4m3 is left as it is."""
    needs_bf16(isa)
    weights = random_weights(format, 45, 512)
    values = weights.values if format in ("i8", "e4m3", "nvfp4") else rounded(weights.values, "bf16", isa)
    for rows in (1, 2, 7, 15, 16, 17, 65):
        x = activations(rows, 512)
        with cpu_kernels.forced(isa):
            y = product(x, weights.tiles, in_bf16=True)
        assert_close(y, rounded(x, "f32" if format == "e4m3" else "bf16", isa), values)


@every_isa
@pytest.mark.parametrize("format", [*QUANTIZED, "u4", "i8"])
def test_products_in_bf16_err_half_as_much_as_those_of_int8(isa, format):
    """The mean relative error of rows, against the product that was meant."""
    needs_bf16(isa)
    weights, x = random_weights(format, 128, 1024), activations(64, 1024)
    exact = x.astype(np.float64) @ weights.values.T
    with cpu_kernels.forced(isa):
        found = [product(x, weights.tiles, in_bf16=in_bf16) for in_bf16 in (True, False)]
    fine, coarse = ((np.linalg.norm(y - exact, axis=1) / np.linalg.norm(exact, axis=1)).mean() for y in found)
    assert fine < 0.5 * coarse


def test_products_in_bf16_are_refused_where_there_are_none():
    weights = random_weights("q4_1", 32, 64)
    with cpu_kernels.forced("portable"), pytest.raises(Exception, match="portable has no products of bfloat16"):
        product(activations(2, 64), weights.tiles, in_bf16=True)


@every_isa
def test_int8_activations_cost_little_precision(isa):
    """Against the product that was meant, not the one with rounded activations."""
    weights = random_weights("q8_0", 64, 1024)
    x = activations(4, 1024)
    with cpu_kernels.forced(isa):
        y = product(x, weights.tiles)
    exact = x.astype(np.float64) @ weights.values.T
    assert np.linalg.norm(y - exact) < 0.01 * np.linalg.norm(exact)


@every_isa
@every_format
def test_a_row_does_not_depend_on_its_neighbours_or_the_threads(isa, format):
    """To the last bit: few rows, many rows and the pieces in between add up in the same order."""
    weights = random_weights(format, 100, 256)
    x = activations(70, 256)
    with cpu_kernels.forced(isa, threads=1):
        expected = product(x, weights.tiles)
        for rows in (1, 2, 5, 11, 13):
            np.testing.assert_array_equal(product(x[:rows], weights.tiles), expected[:rows])
    for threads in (2, 3, 4):
        with cpu_kernels.forced(isa, threads=threads):
            np.testing.assert_array_equal(product(x, weights.tiles), expected)


@every_isa
@every_format
def test_weights_are_read_in_either_order_to_the_same_sums(isa, format):
    weights = random_weights(format, 40, 512)
    x = activations(27, 512)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 25, 27):
        with cpu_kernels.forced(isa, reads_by_group=False):
            expected = product(x[:rows], weights.tiles)
        with cpu_kernels.forced(isa, reads_by_group=True):
            np.testing.assert_array_equal(product(x[:rows], weights.tiles), expected)


@every_format
def test_vector_instruction_sets_agree_to_the_last_bit(format):
    vectors = [isa for isa in ISAS if isa != "portable"]
    if format == "bf16":  # by rounded activations, which are added up in another order where there are tiles
        vectors = [isa for isa in vectors if not cpu_kernels.rounds_to_bf16(isa)]
    weights = random_weights(format, 33, 512)
    x = activations(20, 512)
    results = []
    for isa in vectors:
        with cpu_kernels.forced(isa):
            results.append(product(x, weights.tiles))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@every_isa
@every_format
def test_a_row_that_is_not_finite_spoils_itself_alone(isa, format):
    weights = random_weights(format, 40, 256)
    for rows, bad in itertools.product((3, 20), (math.nan, math.inf, -math.inf)):
        x = activations(rows, 256)
        with cpu_kernels.forced(isa):
            expected = product(x, weights.tiles)
            x[1, 77] = bad
            y = product(x, weights.tiles)
        assert not np.isfinite(y[1]).any()
        others = np.arange(rows) != 1
        np.testing.assert_array_equal(y[others], expected[others])


@every_isa
@pytest.mark.parametrize("format", ["q4_0", "q6_k", "f32"])
def test_tiny_and_huge_activations(isa, format):
    weights = random_weights(format, 16, 256)
    x = activations(3, 256)
    x[1] *= np.float32(1e-37)
    x[2] *= np.float32(1e30)
    with cpu_kernels.forced(isa):
        y = product(x, weights.tiles)
    assert np.isfinite(y).all()
    assert_close(y[2] / 1e30, rounded(x[2:], format, isa) / 1e30, weights.values)


@every_isa
@pytest.mark.parametrize("format", ["q4_1", "q8_0", "bf16", "f32"])
def test_bfloat16_activations(isa, format):
    weights = random_weights(format, 30, 256)
    x = activations(5, 256).astype(ml_dtypes.bfloat16)
    with cpu_kernels.forced(isa):
        y = product(x, weights.tiles)
    assert_close(y, rounded(x.astype(np.float32), format, isa), weights.values)


@every_isa
@pytest.mark.parametrize("format", ["bf16", "f32"])
def test_float_weights_of_any_width(isa, format):
    weights = random_weights(format, 20, 83)
    x = activations(6, 83)
    with cpu_kernels.forced(isa):
        y = product(x, weights.tiles)
    assert_close(y, rounded(x, format, isa), weights.values)


def test_leading_axes_are_kept():
    weights = random_weights("q8_0", 20, 64)
    x = activations(6, 64)
    assert product(x.reshape(2, 3, 64), weights.tiles).shape == (2, 3, 20)


def normalised(x: np.ndarray, weight: np.ndarray, epsilon: float, offset: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * (weight + offset)


@every_isa
@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize(("epsilon", "offset"), [(1e-5, 0.0), (1e-2, 1.0)])
def test_a_norm_and_several_matrices_of_different_formats(isa, rows, epsilon, offset):
    """As q, k and v of a Q4_K_M file are."""
    parts = [
        random_weights(format, n, 256, n)
        for format, n in (("q4_k", 48), ("i8", 32), ("q4_k", 16), ("e4m3", 9), ("q6_k", 19), ("f32", 5))
    ]
    x, norm = activations(rows, 256), np.random.default_rng(0).normal(size=256).astype(np.float32)
    tiles = tuple((part.tiles.tiles, part.tiles.scales) for part in parts)
    formats, sizes = tuple(part.tiles.format for part in parts), tuple(part.tiles.rows for part in parts)
    with cpu_kernels.forced(isa):
        results = products(x, tiles, norm, formats=formats, rows=sizes, epsilon=epsilon, offset=offset)
    exact = normalised(x, norm, epsilon, offset)
    for y, part in zip(results, parts, strict=True):
        tolerance = 2e-6 if part.tiles.format in ("f32", "e4m3") else 0.01
        assert (np.abs(y - exact @ part.values.T) <= tolerance * (np.abs(exact) @ np.abs(part.values).T) + 1e-6).all()


@every_isa
@pytest.mark.parametrize("rows", [1, 30])
def test_a_residual_is_added(isa, rows):
    weights = random_weights("q4_0", 50, 128)
    x, residual = activations(rows, 128), activations(rows, 50, 2)
    with cpu_kernels.forced(isa):
        y = product(x, weights.tiles, residual=residual)
        np.testing.assert_array_equal(y, residual + product(x, weights.tiles))


def reference_activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return {"silu": x / (1 + np.exp(-x)), "relu": np.maximum(x, 0), "relu2": np.maximum(x, 0) ** 2}[name]


@every_isa
@pytest.mark.parametrize("activation", cpu_kernels.ACTIVATIONS)
def test_mlp(isa, activation):
    gate, up, down = random_weights("f32", 96, 64, 3), random_weights("f32", 96, 64, 4), random_weights("f32", 41, 96)
    mlp = jax.jit(lambda x: cpu_kernels.mlp(x, gate.tiles, up.tiles, down.tiles, activation))
    for rows in (1, 2, 17, 70):
        x = np.random.default_rng(5).normal(size=(rows, 64)).astype(np.float32)
        with cpu_kernels.forced(isa):
            y = mlp(x)
        wide = x.astype(np.float64)
        hidden = reference_activation(activation, wide @ gate.values.T) * (wide @ up.values.T)
        assert (np.abs(y - hidden @ down.values.T) <= 2e-6 * (np.abs(hidden) @ np.abs(down.values.T))).all()


@every_format
def test_an_mlp_is_its_products_one_after_the_other(format):
    """Bit for bit, behind a norm, with a residual; gate and up are of other formats than down."""
    gate, up = random_weights("q4_k", 512, 256, 3), random_weights("q6_k", 512, 256, 4)
    down, norm = random_weights(format, 45, 512, 5), RowNorm(jnp.linspace(0.5, 2, 256), 1e-6, 0.5)
    same = Tiles(cpu_kernels.repack("f32", np.eye(512, dtype=np.float32)), "f32", 512)

    def mlp(x, down, **options):
        return cpu_kernels.mlp(x, gate.tiles, up.tiles, down, "silu", norm=norm, **options)

    at_once = jax.jit(lambda x, residual: mlp(x, down.tiles, residual=residual))
    hidden_of = jax.jit(lambda x: mlp(x, same))
    for rows, isa in itertools.product((1, 2, 12, 65), ISAS):
        x, residual = activations(rows, 256), activations(rows, 45, 2)
        with cpu_kernels.forced(isa):
            hidden = hidden_of(x)
            g, u = (np.asarray(part, np.float64) for part in both(x, gate.tiles, up.tiles, norm))
            np.testing.assert_allclose(hidden, g / (1 + np.exp(-g)) * u, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(at_once(x, residual), product(hidden, down.tiles, residual=residual))


def both(x, gate: Tiles, up: Tiles, norm: RowNorm):
    arrays = ((gate.tiles, gate.scales), (up.tiles, up.scales))
    formats, rows = (gate.format, up.format), (gate.rows, up.rows)
    return products(x, arrays, norm.weight, formats=formats, rows=rows, epsilon=1e-6, offset=norm.weight_offset)


def test_an_mlp_whose_parts_do_not_fit_is_refused():
    wide, narrow, down = (random_weights("q4_0", rows, 64).tiles for rows in (64, 32, 64))
    x = jnp.zeros((1, 64))
    with pytest.raises(ValueError, match="activation 'silu' of 64 by 32 rows"):
        cpu_kernels.mlp(x, wide, narrow, down, "silu")
    with pytest.raises(ValueError, match="down takes 64 inputs, and gate and up have 32 rows"):
        cpu_kernels.mlp(x, narrow, narrow, down, "silu")
    with pytest.raises(ValueError, match="activation 'tanh'"):
        cpu_kernels.mlp(x, wide, wide, down, "tanh")


@every_isa
@pytest.mark.parametrize("rows", [1, 14, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_argmax_is_that_of_the_product(isa, rows, threads):
    weights = random_weights("q8_0", 1000, 64)
    x = activations(rows, 64)
    with cpu_kernels.forced(isa, threads):
        best = jax.jit(lambda x: cpu_kernels.argmax(x, weights.tiles))(x)
        np.testing.assert_array_equal(best, product(x, weights.tiles).argmax(-1))
    assert best.dtype == np.int32


def test_argmax_takes_the_first_of_equals_and_of_nan():
    values = np.zeros((40, 32), np.float32)
    values[[7, 30], 0] = 1.0
    head = Tiles(cpu_kernels.repack("f32", values), "f32", 40)
    x = np.zeros((3, 32), np.float32)
    x[1, 0], x[2, 0] = 5.0, math.nan
    np.testing.assert_array_equal(jax.jit(lambda x: cpu_kernels.argmax(x, head))(x), [0, 7, 0])


@every_format
def test_rows_by_number(format):
    weights = random_weights(format, 50, 256)
    ids = np.array([[3, 49], [0, 17]])
    found = jax.jit(lambda ids: cpu_kernels.embed(ids, weights.tiles, 256))(ids)
    np.testing.assert_array_equal(found, weights.values[ids].astype(np.float32))


def test_shapes_that_do_not_fit_are_refused():
    weights = random_weights("q4_k", 16, 512)
    with pytest.raises(Exception, match="2 blocks of 256 do not hold 256 inputs"):
        jax.block_until_ready(jax.jit(lambda x: cpu_kernels.linears(x, [weights.tiles]))(np.ones((1, 256), np.float32)))


@pytest.mark.parametrize(
    ("format", "scales"), [("i8", (1, 2, 16)), ("i8", (2, 1, 16)), ("e4m3", (1, 3, 16)), ("e4m3", None)]
)
def test_scales_that_do_not_fit_are_refused(format, scales):
    weights = random_weights(format, 16, 64).tiles._replace(
        scales=None if scales is None else np.ones(scales, np.float32)
    )
    with pytest.raises(Exception, match=r"scales must be float32 \[groups, runs, 16\]|do not fit the tiles"):
        jax.block_until_ready(jax.jit(lambda x: cpu_kernels.linears(x, [weights]))(np.ones((1, 64), np.float32)))


def random_experts(format: str, count: int, rows: int, inputs: int) -> tuple[np.ndarray, Tiles]:
    experts = [random_weights(format, rows, inputs, seed) for seed in range(count)]
    tiles = np.stack([np.asarray(expert.tiles.tiles) for expert in experts])
    scales = None if experts[0].tiles.scales is None else np.stack([expert.tiles.scales for expert in experts])
    return np.stack([expert.values for expert in experts]), Tiles(tiles, format, rows, scales)


def grouped(x, weights: Tiles, sizes):
    product = jax.jit(lambda x, tiles, sizes: cpu_kernels.grouped_matmul(x, weights._replace(tiles=tiles), sizes))
    return np.asarray(product(x, weights.tiles, sizes))


@pytest.mark.parametrize("format", ["q4_k", "q8_0", "u4", "i8", "bf16", "f32"])
@pytest.mark.parametrize(
    "sizes",
    [(2, 0, 1), (0, 0, 5), (1, 70, 3), (0, 0, 0), (130, 1, 0)],
    ids=["with a gap", "one alone", "more than a panel", "none", "two panels and a bit"],
)
def test_grouped_matmul(format, sizes):
    """Rows past the last group's are nobody's, and may hold anything."""
    values, weights = random_experts(format, 3, 20, 256)
    total = sum(sizes)
    x = activations(total + 3, 256)
    x[total:] = math.nan
    for isa in ISAS:
        with cpu_kernels.forced(isa):
            y = grouped(x, weights, jnp.array(sizes))
        np.testing.assert_array_equal(y[total:], 0)
        ends = np.cumsum(sizes)
        for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            rows = slice(end - size, end)
            assert_close(y[rows], rounded(x[rows], format, isa), values[expert])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_expert_does_not_depend_on_the_others(threads):
    _, weights = random_experts("q4_0", 4, 40, 64)
    x = activations(90, 64)
    with cpu_kernels.forced(threads=threads):
        y = grouped(x, weights, jnp.array([3, 70, 0, 17]))
        alone = product(x[3:73], Tiles(weights.tiles[1], "q4_0", 40))
    np.testing.assert_array_equal(y[3:73], alone)
