"""What adapters add to products; to be called while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from jaxllm.cpu_kernels.library import call


class AdapterArrays(NamedTuple):
    """All adapters of one product: `a` holds `r` rows for each of its parts, one after the other.

    `gain` is what the product itself is multiplied by and added: that of an adapter with magnitudes (DoRA). `ranks` are
    the adapters' own, up to `r`: 0 for parts that an adapter leaves alone, which are not read.
    """

    a: BFloat16[Array, "N k i"]
    b: BFloat16[Array, "N r o"]
    gain: BFloat16[Array, "N o"]
    ranks: Int32[Array, "N p"]


class AdapterUses(NamedTuple):
    """How much of each adapter each token has, and 1 for adapters that have gains."""

    scales: Float32[Array, "T N"]
    gains: Int32[Array, "N"]


def low_rank(
    parts: Sequence[Float32[Array, "T _"]], x: Float[Array, "T i"], arrays: AdapterArrays, uses: AdapterUses
) -> tuple[jax.Array, ...]:
    """The parts of a product `p`, with `sum over n of scales[t, n] * (b[n].T @ (a[n] @ x[t]) + gain[n] * p[t])` added.

    See `pallas_kernels/products.py`. Only adapters with a scale that is not 0 are read, and of these the rows up to
    their own ranks, and gains where they have some. Sums are float32, and a token's result does not depend on the
    others.
    """
    shapes = tuple(ShapeDtypeStruct(part.shape, jnp.float32) for part in parts)
    given = (x.astype(jnp.float32), *arrays, *uses)
    aliases = {len(given) + index: index for index in range(len(parts))}
    return tuple(call("jaxllm_low_rank", shapes, input_output_aliases=aliases)(*given, *parts))
