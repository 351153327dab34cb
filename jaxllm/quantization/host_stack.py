"""Stacks of matrices of which a device has some, and the others are in the memory of its host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.quantization.weight import Weight
from jaxllm.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartlyOnHost(Weight):
    """A stack whose last matrices, or those of each device's part of it, are in host memory.

    A step that reads these asks for one after the other, by `fetch`.

    Attributes:
        resident: the other matrices; None where all are in host memory.
        host: floats of 16 bits are here as integers of as many, which XLA:CPU slices as they are.
        dtypes: what the arrays of `host` are on a device, in pytree order.
    """

    resident: Weight | None
    host: Weight
    dtypes: tuple[np.dtype, ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        count, *matrix = self.host.shape
        return (count + (0 if self.resident is None else self.resident.shape[0]), *matrix)

    @property
    def num_resident(self) -> int:
        """How many matrices are on the device; inside `shard_map` on this one."""
        return self.shape[0] - self.host.shape[0]

    def dequantize(self) -> Float[Array, "X o i"]:
        """All of it, which takes as much of the device."""
        parts = [] if self.resident is None else [self.resident.dequantize()]
        moved = self.stack_of(tuple(map(_on_device, jax.tree.leaves(self.host), self.dtypes)))
        return jnp.concatenate([*parts, moved.dequantize()])

    def axes(self, axes: Axes) -> list[Axes]:
        return [*([] if self.resident is None else self.resident.axes(axes)), *self.host.axes(axes)]

    @property
    def on_host(self) -> list[bool]:
        """Of each array, in pytree order, whether it is in host memory."""
        return [False] * len(jax.tree.leaves(self.resident)) + [True] * len(self.dtypes)

    def fetch(
        self, index: Int[Array, ""], places: tuple[jax.Array, ...], place: Int[Array, ""]
    ) -> tuple[jax.Array, ...]:
        """The arrays of a stack on the device, with matrix `index` of `host` in one place; no other is read."""

        def moved(array: jax.Array, there: jax.Array, dtype: np.dtype) -> jax.Array:
            matrix = _on_device(lax.dynamic_index_in_dim(array, index, keepdims=False), dtype)
            return lax.dynamic_update_index_in_dim(there, matrix, place, 0)

        return tuple(map(moved, jax.tree.leaves(self.host), places, self.dtypes))

    def stack_of(self, arrays: tuple[jax.Array, ...]) -> Weight:
        """What such arrays are a stack of matrices as."""
        stack: Weight = jax.tree.unflatten(jax.tree.structure(self.host), arrays)
        return stack


@dataclass(frozen=True)
class HostShare:
    """The last `count` matrices of a stack are in host memory; of each device's part, where `devices` share it."""

    count: int
    devices: int = 1

    def split(self, stack: Weight) -> PartlyOnHost:
        """A stack of NumPy arrays, or of shapes alone, in its two parts."""
        arrays, tree = jax.tree.flatten(stack)
        each = arrays[0].shape[0] // self.devices
        first, last = slice(each - self.count), slice(each - self.count, each)
        resident: Weight | None = None
        if each > self.count:
            resident = jax.tree.unflatten(tree, [self._part(array, first) for array in arrays])
        host: Weight = jax.tree.unflatten(tree, [_as_bits(self._part(array, last)) for array in arrays])
        return PartlyOnHost(resident, host, tuple(np.dtype(array.dtype) for array in arrays))

    def _part(self, array: Any, rows: slice) -> Any:
        """Some matrices of each device's."""
        each = array.shape[0] // self.devices
        count = len(range(each)[rows])
        shape = (self.devices * count, *array.shape[1:])
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype)
        return np.ascontiguousarray(array.reshape(self.devices, each, *array.shape[1:])[:, rows].reshape(shape))


def _is_narrow_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 2


def _as_bits(array: Any) -> Any:
    if not _is_narrow_float(array.dtype):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, np.uint16)
    return array.view(np.uint16)


def _on_device(array: jax.Array, dtype: np.dtype) -> jax.Array:
    moved = jax.device_put(array, jax.memory.Space.Device)
    return lax.bitcast_convert_type(moved, dtype) if _is_narrow_float(dtype) else moved
