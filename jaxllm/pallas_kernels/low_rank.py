"""What adapters add to a product, in plain XLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxllm.cpu_kernels import AdapterArrays, AdapterUses


def low_rank(
    parts: Sequence[Float[Array, "T _"]], x: Float[Array, "T i"], arrays: AdapterArrays, uses: AdapterUses
) -> tuple[jax.Array, ...]:
    """The parts of a product `p`, with `sum over n of scales[t, n] * (b[n].T @ (a[n] @ x[t]) + gain[n] * p[t])` added.

    `parts` are what the product has of each tensor that it is fused of, float32 as the result. Each goes with `r` of
    the `k` rows of `a`, and with as many columns of `b` and `gain` as it has, all in the same order. An adapter's own
    rank of a part, `ranks[n, part]`, may be below `r`; the rest of its rows are zeros, and so are the gains of one that
    has none.

    All adapters are computed for all tokens in two products: `N * r` columns beside the thousands of the weight itself.
    """
    a, b, gain, _ = arrays
    places, rank, _ = b.shape
    inner = _product(x, a.reshape(-1, a.shape[-1]).T).reshape(len(x), places, len(parts), rank)
    inner = inner * uses.scales[:, :, None, None]
    factor = 1 + jnp.matmul(uses.scales, gain.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    added, first = [], 0
    for index, part in enumerate(parts):
        end = first + part.shape[1]
        matrix = b[:, :, first:end].reshape(places * rank, -1)
        added.append(part * factor[:, first:end] + _product(inner[:, :, index].reshape(len(x), -1), matrix))
        first = end
    return tuple(added)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    return jnp.matmul(x.astype(matrix.dtype), matrix, precision=precision, preferred_element_type=jnp.float32)
