"""Grouped matmul against float64 NumPy, on ragged groups at every edge of the tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from jaxllm.pallas_kernels import choose_kernels
from jaxllm.pallas_kernels.products import ragged_dot, tiles
from jaxllm.quantization.weight import Dense

GROUPS, OUT, IN = 5, 24, 16
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")

GROUPED_MATMUL = {"tiles": tiles, "ragged_dot": ragged_dot}


@partial(jax.jit, static_argnames="backend")
def multiply(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, backend: str = "tiles") -> jax.Array:
    return GROUPED_MATMUL[backend](x, Dense(weight), group_sizes)


def operands(rows: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((rows, IN)), jnp.float32)
    return x, jnp.asarray(random.standard_normal((GROUPS, OUT, IN)), dtype)


def oracle(x: jax.Array, weight: jax.Array, sizes: list[int]) -> np.ndarray:
    x, weight = np.asarray(x.astype(weight.dtype), np.float64), np.asarray(weight, np.float64)
    out = np.zeros((len(x), weight.shape[1]))
    row = 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            out[row] = weight[group] @ x[row]
            row += 1
    return out


def check(x: jax.Array, weight: jax.Array, sizes: list[int], backend: str = "tiles") -> None:
    out = multiply(x, weight, jnp.asarray(sizes, jnp.int32), backend=backend)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, oracle(x, weight, sizes), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[sum(sizes) :], 0)


EDGES: dict[str, tuple[int, list[int]]] = {
    "one row": (1, [0, 0, 1, 0, 0]),
    "one row, in no group": (1, [0, 0, 0, 0, 0]),
    "two rows, two groups": (2, [1, 0, 0, 0, 1]),
    "fewer rows than groups": (3, [0, 1, 0, 2, 0]),
    "all rows in the first group": (203, [203, 0, 0, 0, 0]),
    "all rows in the last group": (203, [0, 0, 0, 0, 203]),
    "all rows in one group, then rows of none": (203, [0, 0, 130, 0, 0]),
    "no row in any group": (203, [0, 0, 0, 0, 0]),
    "even groups": (200, [40, 40, 40, 40, 40]),
    "one row each, then rows of none": (203, [1, 1, 1, 1, 1]),
    "powers of two and their neighbours": (203, [64, 63, 65, 1, 2]),
}


@pytest.mark.parametrize("backend", GROUPED_MATMUL)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge, backend):
    rows, sizes = EDGES[edge]
    check(*operands(rows), sizes, backend)


@given(
    rows=st.sampled_from([4, 16, 67, 160]),
    cuts=st.lists(st.floats(0, 1), min_size=GROUPS, max_size=GROUPS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_ragged_groups(rows, cuts, seed):
    ends = np.sort(np.round(np.array(cuts) * rows).astype(int))
    check(*operands(rows, seed=seed), np.diff(ends, prepend=0).tolist())


@pytest.mark.parametrize("backend", GROUPED_MATMUL)
def test_bfloat16_weights_take_bfloat16_rows_and_sum_in_float32(backend):
    check(*operands(67, jnp.bfloat16), [3, 0, 40, 7, 11], backend)


@pytest.mark.parametrize("backend", GROUPED_MATMUL)
def test_what_is_not_finite_stays_in_its_row(backend):
    x, weight = operands(67)
    sizes = jnp.asarray([3, 0, 40, 7, 11], jnp.int32)
    clean = multiply(x, weight, sizes, backend=backend)
    out = multiply(x.at[5].set(jnp.nan).at[61:].set(jnp.inf), weight, sizes, backend=backend)
    assert np.isnan(out[5]).all()
    np.testing.assert_array_equal(np.delete(out, 5, axis=0), np.delete(clean, 5, axis=0))


def test_weights_of_empty_groups_are_not_touched():
    x, weight = operands(4)
    out = multiply(x, weight.at[jnp.array([0, 2, 4])].set(jnp.nan), jnp.asarray([0, 1, 0, 3, 0], jnp.int32))
    np.testing.assert_allclose(out, oracle(x, weight, [0, 1, 0, 3, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [2, 16, 1024])
def test_rows_are_not_expanded_over_groups_nor_weights_copied(rows, dtype):
    groups, out, size = 32, 192, 256
    shapes = [
        jax.ShapeDtypeStruct((rows, size), dtype),
        jax.ShapeDtypeStruct((groups, out, size), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ]
    compiled = multiply.lower(*shapes).compile()
    expert = 4 * out * size
    in_and_out = 4 * rows * (size + out)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * expert + in_and_out


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowers_for_every_platform(platform):
    chosen = choose_kernels("auto", platform).grouped_matmul
    shapes = [
        jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 256, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    ]
    device = H100 if platform == "cuda" else None
    with use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)):
        lowered = (
            jax.jit(lambda x, weight, sizes: chosen(x, Dense(weight), sizes))
            .trace(*shapes)
            .lower(lowering_platforms=(platform,))
        )
    assert lowered.out_info.shape == (64, 256)
