"""Weights whose inputs were sorted before they were quantized (GPTQ's act-order, arXiv:2210.17323, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
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
    """

    weight: Weight
    order: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        place = jnp.argsort(self.order, axis=-1)[..., None, :]
        return jnp.take_along_axis(self.weight.dequantize(), place, -1)

    def axes(self, axes: Axes) -> list[Axes]:
        return [*self.weight.axes(axes), (*axes[:-2], axes[-1])]

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T` in float32: the inputs are brought into the columns' order."""
        return self.weight.matmul(x[:, self.order])

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        return self.weight.rows(ids)[:, jnp.argsort(self.order)]

    def select(self, index: Int[Array, ""]) -> Ordered:
        return Ordered(self.weight.select(index), self.order[index])


@dataclass(frozen=True)
class OrderedKind:
    """Another kind with its columns in the checkpoint's order; segments of a product may each have their own."""

    kind: WeightKind
    joins: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return self.kind.block

    def abstract(self, shape: tuple[int, ...]) -> Ordered:
        order = jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.int32)
        return Ordered(self.kind.abstract(shape), order)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Ordered:
        (tensor,) = tensors
        if isinstance(tensor.weight, Ordered):
            kept, order = tensor.weight.weight, np.asarray(tensor.weight.order)
            if not np.array_equal(np.sort(order), np.broadcast_to(np.arange(order.shape[-1]), order.shape)):
                raise CheckpointError(f"{tensor.origin}: its order does not name each of {order.shape[-1]} inputs once")
            inner = tensor._replace(data=jax.tree.leaves(kept)[0], weight=kept)
            return Ordered(self.kind.pack([inner], layout), order)
        assert tensor.codes is not None and tensor.codes.order is not None
        order = np.asarray(tensor.codes.order, np.int32)
        sorted_ = tensor._replace(codes=replace(tensor.codes, order=None))
        return Ordered(self.kind.pack([sorted_], layout), order)
