"""What adapters add to a product: LoRA (Hu et al. 2021, arXiv:2106.09685), several adapters in one batch.

The arrays of all adapters that are on the devices are tables: one row an adapter. They are no parameters of the model,
and a step that was compiled without them pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.hands import told
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.pallas_kernels import AdapterArrays, AdapterUses
from jaxllm.sharding.mesh import Axes, Layout


class AdapterTable(nnx.Variable):
    """One array of every adapter, `[places, ...]`; it says how it is sharded as a parameter does."""


def adapter_uses() -> AdapterUses:
    """How much of each adapter the step's tokens have."""
    step = told().meta
    assert step.adapter_scales is not None, "tables are used in steps that have scales"
    assert step.adapter_gains is not None, "a model with tables knows which of its adapters have gains"
    return AdapterUses(step.adapter_scales, step.adapter_gains)


def adapter_numbers(sizes: AdapterSizes | None) -> AdapterTable | None:
    """A table of one number an adapter: whether it has gains."""
    return None if sizes is None else _table((sizes.places,), jnp.int32, (None,))


class AdapterTables(nnx.Module):
    """`sum over adapters of scale * (b.T @ (a @ x) + gain * w @ x)`, for a product `w @ x` with an `[o, i]` weight.

    A product that is fused of several tensors has an `a` for each of them, one after the other; the columns of `b` that
    belong to a tensor go with its own. What files call B is `b` transposed: so its columns lie side by side. An
    adapter's own rank for a tensor may be below the tables', and is 0 where it leaves the tensor alone. A product with
    a bias has a table of what adapters add to that.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        axes: Axes,
        layout: Layout | None,
        bias: bool = False,
    ):
        assert options.adapters is not None, "a model without adapters has no tables of them"
        sizes, dtype = options.adapters, options.dtype
        parts = layout.segments if layout is not None else ()
        places, rank, num_parts = sizes.places, sizes.rank, max(1, len(parts))
        self.a = _table((places, num_parts * rank, in_features), dtype, (None, None, axes[1]))
        self.b = _table((places, rank, out_features), dtype, (None, None, axes[0]), layout)
        self.gain = _table((places, out_features), dtype, (None, axes[0]), layout)
        self.ranks = _table((places, num_parts), jnp.int32, (None, None))
        self.bias = _table((places, out_features), jnp.float32, (None, axes[0]), layout) if bias else None
        self.kernels = options.kernels

    @property
    def arrays(self) -> AdapterArrays:
        """As they are now: what kernels take."""
        return AdapterArrays(self.a[...], self.b[...], self.gain[...], self.ranks[...])

    def biases(self) -> Float[Array, "T o"]:
        """What the tokens' adapters add to a product's bias, float32."""
        assert self.bias is not None, "a product without a bias gets none"
        # No product of matrices: how that sums up may depend on the number of tokens.
        return jnp.sum(adapter_uses().scales[:, :, None] * self.bias[...], axis=1)

    def added(self, parts: Sequence[Float[Array, "T _"]], x: Float[Array, "T i"]) -> tuple[jax.Array, ...]:
        """What a product has of each tensor, float32, and what the tokens' adapters add to it for their inputs `x`."""
        return self.kernels.low_rank(parts, x, self.arrays, adapter_uses())


def _table(shape: tuple[int, ...], dtype: Any, axes: Axes, layout: Layout | None = None) -> AdapterTable:
    return AdapterTable(jax.ShapeDtypeStruct(shape, dtype), axes=axes, layout=layout)
