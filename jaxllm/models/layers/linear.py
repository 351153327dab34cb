"""Parameters, and matrix products and embeddings with weights stored `[out, in]`, as checkpoints have them.

A parameter has a shape and no memory, and says how it is sharded: what a model is loaded with takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.hands import add_product
from jaxllm.models.layers.low_rank import AdapterTables, adapter_uses
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import LATER, Late, Later, Norm, Residual, Unsummed, late_sum
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


def param(shape: tuple[int, ...], dtype: Any, axes: Axes | None = None, layout: Layout | None = None) -> nnx.Param:
    """A plain array of the global `shape`, replicated unless `axes` names a mesh axis; `layout` describes its axis 0.

    The axes are our own metadata: NNX's `sharding` would ask for a mesh.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes or (None,) * len(shape), layout=layout)


def weight(
    shape: tuple[int, ...],
    dtype: Any,
    axes: Axes | None = None,
    layout: Layout | None = None,
    host: HostShare | None = None,
) -> nnx.Param:
    """A matrix `[*stack, o, i]`, likewise. It is declared dense; what it is kept as is decided when it is loaded.

    `host` says what part of a stack is to be in host memory.
    """
    dense = Dense(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(dense, axes=axes or (None,) * len(shape), layout=layout, host=host)


class Linear(nnx.Module):
    """A product with an `[o, i]` weight, and a bias or none; every device does it whole unless `axes` divide it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        bias: bool = False,
        *,
        axes: Axes = (None, None),
        layout: Layout | None = None,
        adaptable: bool = True,
    ):
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
        """The product with `x`, or with `norm(x)`."""
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
        """The parts of this device's product and what adapters add to them, in float32.

        There may be a `residual`, which is added, where the product has one part.
        """
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
        """The sum of the devices' products, added to `residual` if there is one."""
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
        """The embeddings of `tokens`."""
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
