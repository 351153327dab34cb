"""Weights whose inputs were sorted before they were quantized (GPTQ's act-order, arXiv:2210.17323, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.pallas_kernels.ordered_matrix import OrderedMatrix, arranged
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import Weight, WeightKind
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ordered(Weight):
    """A weight with its columns in another order, in which groups of them lie together.

    Attributes:
        weight: column `j` is for input `order[j]`.
        order: int32 `[*stack, i]`.
        divided: whether devices have a part of the columns each, which may be for inputs of any device.
    """

    weight: Weight
    order: Any
    divided: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        """The matrix as floats: the whole of it, where it is divided over devices."""
        place = jnp.argsort(self.order, axis=-1)[..., None, :]
        return jnp.take_along_axis(self.weight.dequantize(), place, -1)

    def axes(self, axes: Axes) -> list[Axes]:
        return [*self.weight.axes(axes), (*axes[:-2], axes[-1])]

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T` in float32: the inputs are brought into the columns' order."""
        return self.weight.matmul(arranged(x, self.order, self.divided))

    @property
    def kernel_matrices(self) -> tuple[OrderedMatrix, ...] | None:
        found = self.weight.kernel_matrices
        return None if found is None else tuple(OrderedMatrix(matrix, self.order, self.divided) for matrix in found)

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        return self.weight.rows(ids)[:, jnp.argsort(self.order)]

    def select(self, index: Int[Array, ""]) -> Ordered:
        return Ordered(self.weight.select(index), self.order[index], self.divided)


@dataclass(frozen=True)
class OrderedKind:
    """Another kind with its columns in the checkpoint's order.

    Attributes:
        kind: what the columns are kept as.
        order: the name of their order; segments of a product that share it are one weight, whose inputs are brought
            into that order once. Empty for an order that is not known before it is read.
        divided: see `Ordered`.
    """

    kind: WeightKind
    order: str = ""
    divided: bool = False

    @property
    def block(self) -> int:
        return self.kind.block

    @property
    def joins(self) -> bool:
        return bool(self.order)

    def abstract(self, shape: tuple[int, ...]) -> Ordered:
        order = jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.int32)
        return Ordered(self.kind.abstract(shape), order, self.divided)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Ordered:
        """Raises CheckpointError where an order names an input twice, or is not that of the other segments."""
        orders, kept = zip(*map(_order_and_columns, tensors), strict=True)
        for tensor, order in zip(tensors, orders, strict=True):
            if not np.array_equal(order, orders[0]):
                raise CheckpointError(f"{tensor.origin}: its inputs are not in the order of {tensors[0].origin}")
        return Ordered(self.kind.pack(kept, layout), orders[0], self.divided)


def _order_and_columns(tensor: Stored) -> tuple[np.ndarray, Stored]:
    """The order of a tensor's inputs, and the tensor as if they lay so."""
    if isinstance(tensor.weight, Ordered):
        kept, order = tensor.weight.weight, np.asarray(tensor.weight.order)
        if not np.array_equal(np.sort(order), np.broadcast_to(np.arange(order.shape[-1]), order.shape)):
            raise CheckpointError(f"{tensor.origin}: its order does not name each of {order.shape[-1]} inputs once")
        return order, tensor._replace(data=jax.tree.leaves(kept)[0], weight=kept)
    assert tensor.codes is not None and tensor.codes.order is not None
    return np.asarray(tensor.codes.order, np.int32), tensor._replace(codes=replace(tensor.codes, order=None))
