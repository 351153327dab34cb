"""A norm over all heads of a token together, against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm import cpu_kernels
from jaxllm.models.layers.norm import WholeRMSNorm
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import REFERENCE, Kernels
from jaxllm.pallas_kernels.kernels import CPU
from jaxllm.sharding.mesh import build_meshes


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=lambda kernels: kernels.name)
def test_the_mean_is_over_all_heads(kernels: Kernels):
    if kernels.native and not cpu_kernels.available():
        pytest.skip(str(cpu_kernels.reason()))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 4)) * np.array([1.0, 10.0, 100.0])[:, None]
    weight, eps = rng.standard_normal(12), 0.03
    norm = WholeRMSNorm(12, eps, 1, BuildOptions(kernels=kernels))
    graph, _ = nnx.split(norm)

    def run(weight: jax.Array, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, nnx.State({"weight": nnx.Param(weight)}))(x)

    mapped = jax.shard_map(run, mesh=build_meshes(1)[0], in_specs=(P(), P()), out_specs=P(), check_vma=False)
    found = jax.jit(mapped)(jnp.asarray(weight, jnp.float32), jnp.asarray(x, jnp.float32))
    flat = x.reshape(5, 12)
    expected = flat / np.sqrt((flat**2).mean(1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(np.asarray(found).reshape(5, 12), expected, rtol=2e-6, atol=2e-6)
