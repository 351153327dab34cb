"""Parameters, and matrix products and embeddings with weights stored `[out, in]`, as checkpoints have them.

A parameter has a shape and no memory, and says how it is sharded: what a model is loaded with takes its place. Products
may have tables of adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), one row an adapter. They are no parameters of the
model, and a step that was compiled without them pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.hands import add_product, told
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.pallas_kernels import LATER, AdapterArrays, AdapterUses, Late, Later, Norm, Residual, Unsummed, late_sum
from jaxllm.quantization.weight import Dense, HostShare
from jaxllm.sharding.mesh import (
    TENSOR,
    Axes,
    Layout,
    gather_over_tensor,
    padded_rows,
    sum_over_tensor,
    tensor_rank,
    tensor_size,
)


class AdapterTable(nnx.Variable):
    """One array of every adapter, `[places, ...]`; it says how it is sharded as a parameter does."""


def adapter_uses() -> AdapterUses:
    """The scales of each adapter for the step's tokens."""
    step = told().meta
    assert step.adapter_scales is not None, "tables are used in steps that have scales"
    assert step.adapter_gains is not None, "a model with tables knows which of its adapters have gains"
    return AdapterUses(step.adapter_scales, step.adapter_gains)


def adapter_numbers(sizes: AdapterSizes | None) -> AdapterTable | None:
    """A table of one number an adapter: whether it has gains."""
    return None if sizes is None else _table((sizes.places,), jnp.int32, (None,))


class AdapterTables(nnx.Module):
    """`sum over adapters of scale * (b.T @ (a @ x) + gain * w @ x)`, for a product `w @ x` with an `[o, i]` weight.

    A product that is fused of several tensors has an `a` for each of them, one after the other, which goes with the
    tensor's columns of `b` (the transposed B of files). An adapter's own rank for a tensor may be below the tables',
    and is 0 where it leaves the tensor alone. A product with a bias has a table of what adapters add to that.
    """

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, axes: Axes, layout: Layout | None,
        bias: bool = False,
    ):  # fmt: skip
        assert options.adapters is not None, "a model without adapters has no tables of them"
        places, rank, dtype = options.adapters.places, options.adapters.rank, options.dtype
        num_parts = max(1, len(layout.segments)) if layout is not None else 1
        self.a = _table((places, num_parts * rank, in_features), dtype, (None, None, axes[1]))
        self.b = _table((places, rank, out_features), dtype, (None, None, axes[0]), layout)
        self.gain = _table((places, out_features), dtype, (None, axes[0]), layout)
        self.ranks = _table((places, num_parts), jnp.int32, (None, None))
        self.bias = _table((places, out_features), jnp.float32, (None, axes[0]), layout) if bias else None
        self.kernels = options.kernels

    @property
    def arrays(self) -> AdapterArrays:
        return AdapterArrays(self.a[...], self.b[...], self.gain[...], self.ranks[...])

    def biases(self) -> Float[Array, "T o"]:
        """The biases of the tokens' adapters, float32."""
        assert self.bias is not None, "a product without a bias gets none"
        # No product of matrices: how that sums up may depend on the number of tokens.
        return jnp.sum(adapter_uses().scales[:, :, None] * self.bias[...], axis=1)

    def added(self, parts: Sequence[Float[Array, "T _"]], x: Float[Array, "T i"]) -> tuple[jax.Array, ...]:
        """The `parts` of a product, one a tensor, with the outputs of the tokens' adapters for inputs `x`; float32."""
        return self.kernels.low_rank(parts, x, self.arrays, adapter_uses())


def _table(shape: tuple[int, ...], dtype: Any, axes: Axes, layout: Layout | None = None) -> AdapterTable:
    return AdapterTable(jax.ShapeDtypeStruct(shape, dtype), axes=axes, layout=layout)


def param(shape: tuple[int, ...], dtype: Any, axes: Axes | None = None, layout: Layout | None = None) -> nnx.Param:
    """A plain array of the global `shape`, replicated unless `axes` name a mesh axis; `layout` is of its axis 0."""
    # Axes are metadata of our own, since NNX's `sharding` would ask for a mesh.
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes or (None,) * len(shape), layout=layout)


def weight(
    shape: tuple[int, ...], dtype: Any, axes: Axes | None = None, layout: Layout | None = None,
    host: HostShare | None = None,
) -> nnx.Param:  # fmt: skip
    """A matrix `[*stack, o, i]`, declared dense until it is loaded; `host` is the part of a stack in host memory."""
    dense = Dense(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(dense, axes=axes or (None,) * len(shape), layout=layout, host=host)


class Linear(nnx.Module):
    """A product with an `[o, i]` weight, and a bias or none; every device does it whole unless `axes` divide it."""

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, bias: bool = False, *,
        axes: Axes = (None, None), layout: Layout | None = None, adaptable: bool = True,
    ):  # fmt: skip
        """One that is not `adaptable` has no tables of adapters: its weight is not only multiplied by."""
        self.weight = weight((out_features, in_features), options.dtype, axes, layout)
        self.bias = param((out_features,), jnp.float32, axes[:1], layout) if bias else None
        self.kernels = options.kernels
        has_tables = adaptable and options.adapters is not None
        self.low_rank = AdapterTables(in_features, out_features, options, axes, layout, bias) if has_tables else None

    @property
    def plain(self) -> bool:
        """The product with the weight is all there is to it, so that one kernel may do it with what stands around."""
        return self.bias is None and self.low_rank is None

    def __call__(self, x: Float[Array, "T i"], norm: Norm | None = None) -> Float[Array, "T o"]:
        if self.plain:
            return self.kernels.linear(x, self.weight.get_value(), norm, dtype=x.dtype)
        return self._with_bias(self.partial(x, norm)).astype(x.dtype)

    def partial(
        self, x: Float[Array, "T i"], norm: Norm | None = None, dtype: Any = jnp.float32
    ) -> Float[Array, "T o"]:
        """This device's product alone, summed in float32 and given in `dtype`: without bias or sum over devices."""
        if self.low_rank is None:
            return self.kernels.linear(x, self.weight.get_value(), norm, dtype=dtype)
        parts = self._adapted(x, norm)
        return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)).astype(dtype)

    def _adapted(
        self, x: Float[Array, "T i"], norm: Norm | None, residual: Float[Array, "T o"] | None = None
    ) -> Sequence[Float[Array, "T _"]]:
        """The parts of this device's product and what adapters add to them, in float32; of one part, on `residual`."""
        assert self.low_rank is not None
        weight = self.weight.get_value()
        found = self.kernels.adapted(x, weight, norm, residual, self.low_rank.arrays, adapter_uses())
        if found is not None:
            return found
        x = x if norm is None else norm(x)
        parts = self.low_rank.added(self._parts(self.kernels.linear(x, weight)), x)
        return parts if residual is None else (residual + parts[0].astype(residual.dtype),)

    def _parts(self, out: Float[Array, "T o"]) -> Sequence[Float[Array, "T _"]]:
        return (out,)

    def _with_bias(self, out: Float[Array, "T o"]) -> Float[Array, "T o"]:
        if self.bias is None:
            return out
        out = out + self.bias[...]
        return out if self.low_rank is None else out + self.low_rank.biases()


class ColumnLinear(Linear):
    """A product whose output rows are divided over the tensor axis, several checkpoint tensors fused in one weight."""

    def __init__(
        self, in_features: int, layout: Layout, options: BuildOptions, bias: bool = False, *, adaptable: bool = True
    ):
        axes = (TENSOR, None)
        super().__init__(in_features, layout.rows, options, bias, axes=axes, layout=layout, adaptable=adaptable)
        self.sizes = tuple(segment.rows // segment.shards for segment in layout.segments)

    def segments(self, x: Float[Array, "T i"], norm: Norm | None = None) -> list[Float[Array, "T _"]]:
        """The product, a tensor's rows at a time."""
        if self.bias is not None:
            return self._parts(self(x, norm))
        if self.low_rank is not None:
            return [part.astype(x.dtype) for part in self._adapted(x, norm)]
        parts = self.kernels.segments(x, self.weight.get_value(), norm)
        if parts is not None and len(parts) == len(self.sizes):
            return [part.astype(x.dtype) for part in parts]
        return self._parts(self(x, norm))

    def late_segments(
        self, x: Float[Array, "T i"], norm: Norm | None = None
    ) -> tuple[list[Float[Array, "T _"]], Unsummed | None]:
        """The segments, and the product by parts where a kernel made it so: who reads that leaves their sum undone."""
        if not self.plain or self.kernels.add_norm is None:
            return self.segments(x, norm), None
        product = self.kernels.linear(x, self.weight.get_value(), norm, LATER, x.dtype)
        unsummed = product if isinstance(product, Unsummed) else None
        return self._parts(late_sum(product).astype(x.dtype)), unsummed

    def _parts(self, out: Float[Array, "T o"]) -> list[Float[Array, "T _"]]:
        return jnp.split(out, list(accumulate(self.sizes))[:-1], axis=-1)


class RowLinear(Linear):
    """A product whose inputs are divided over the tensor axis; what devices have of it is added up."""

    def __init__(self, in_features: int, out_features: int, options: BuildOptions, bias: bool = False):
        super().__init__(in_features, out_features, options, bias, axes=(None, TENSOR))

    def __call__(self, x: Float[Array, "T i"], norm: Norm | None = None, residual: Residual = None) -> Late:
        product = partial(self._product, x, norm)
        if residual is None or isinstance(residual, Later):
            return product(residual)
        return add_product(product, residual)

    def _product(self, x: Float[Array, "T i"], norm: Norm | None, residual: Residual) -> Late:
        if self.plain and tensor_size() == 1:
            return self.kernels.linear(x, self.weight.get_value(), norm, residual, x.dtype)
        residual = None if isinstance(residual, Later) else residual
        if self.bias is None and tensor_size() == 1:
            return self._adapted(x, norm, residual)[0].astype(x.dtype)
        part = self.partial(x, norm, jnp.float32 if self.kernels.wide_sums else x.dtype)
        out = self._with_bias(sum_over_tensor(part)).astype(x.dtype)
        return out if residual is None else residual + out


class VocabEmbedding(nnx.Module):
    """A `[V, E]` table, padded with zero rows so that every device holds the same number."""

    def __init__(self, vocab_size: int, size: int, options: BuildOptions, bias: bool = False):
        layout = padded_rows(vocab_size, options.tp)
        self.weight = weight((layout.rows, size), options.dtype, (TENSOR, None), layout)
        self.bias = param((layout.rows,), jnp.float32, (TENSOR,), layout) if bias else None
        self.kernels = options.kernels
        self.vocab_size = vocab_size

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        table = self.weight.get_value()
        if tensor_size() == 1:
            return table.rows(tokens)
        count = table.shape[0]
        local = tokens - tensor_rank() * count
        mine = (local >= 0) & (local < count)
        rows = table.rows(jnp.where(mine, local, 0))
        return sum_over_tensor(jnp.where(mine[:, None], rows, 0))

    def most_likely(self, hidden: Float[Array, "R E"]) -> Int[Array, "R"] | None:
        """The token with the highest score, where the kernels find it without the scores."""
        if self.bias is not None or tensor_size() > 1:
            return None
        return self.kernels.most_likely(hidden, self.weight.get_value(), self.vocab_size)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores of every token of the vocabulary, whole on every device."""
        logits = self.kernels.linear(hidden, self.weight.get_value())
        if self.bias is not None:
            logits = logits + self.bias[...]
        return gather_over_tensor(logits)[:, : self.vocab_size]
