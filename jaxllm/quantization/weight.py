"""What a layer multiplies by: a matrix, however its numbers are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.matrices import KernelMatrix, PackedMatrix
from jaxllm.pallas_kernels.products import dot, precision
from jaxllm.quantization.stored import Stored
from jaxllm.sharding.mesh import Axes, Layout, place


class Weight(ABC):
    """A matrix `[o, i]`, or a stack of them `[X, o, i]`, stored as checkpoints have them: outputs first.

    A kind of weight is a registered pytree of its arrays. Inside `shard_map` they are one device's part, and so is
    `shape`. The products here are the reference of every kind: they expand it; a kind or a kernel may do better.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, not of what it is stored in."""

    @abstractmethod
    def dequantize(self) -> Float[Array, "*stack o i"]:
        """The matrix as floats."""

    @abstractmethod
    def axes(self, axes: Axes) -> list[Axes]:
        """The mesh axes of each array, in pytree order, where those of the matrix are `axes`."""

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T`, accumulated and returned in float32."""
        return product(x, self.dequantize())

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        """The rows `ids` of a matrix: embeddings."""
        return self.dequantize()[ids]

    @property
    def matrices(self) -> tuple[Any, ...] | None:
        """What the C++ kernels take, a matrix for each part that was not joined; None if not all lies in tiles."""
        return None

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix | PackedMatrix, ...] | None:
        """What GPU kernels expand a tile of, a matrix for each part that was not joined; None if there is no such."""
        return None

    def select(self, index: Int[Array, ""]) -> Weight:
        return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), self)

    def expand_heads(self, x: Float[Array, "T H i"], per_head: int, rows: slice) -> Float[Array, "T H o"]:
        """Each head's `x` times that head's rows; every `per_head` rows of the matrix are a head's. In `x`'s dtype."""
        return _by_head(x, self._heads(per_head, rows), contract=2)

    def absorb_heads(self, x: Float[Array, "T H o"], per_head: int, rows: slice) -> Float[Array, "T H i"]:
        """The transpose of `expand_heads`: from a head's rows back to the matrix's inputs."""
        return _by_head(x, self._heads(per_head, rows), contract=1)

    def _heads(self, per_head: int, rows: slice) -> Float[Array, "H o i"]:
        matrix = self.dequantize()
        return rearrange(matrix, "(head row) i -> head row i", row=per_head)[:, rows]


@runtime_checkable
class WeightKind(Protocol):
    """A way of keeping weights.

    Attributes:
        block: how many neighbouring inputs are stored together; a shard must not part them.
        joins: whether neighbouring segments of this kind become one weight.
    """

    @property
    def block(self) -> int: ...

    @property
    def joins(self) -> bool: ...

    def abstract(self, shape: tuple[int, ...]) -> Weight:
        """A weight of `shape` whose arrays are `jax.ShapeDtypeStruct`."""

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Weight:
        """Checkpoint tensors `[*stack, o, i]`, laid out for the mesh and kept this way, in host memory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Weight):
    array: Any
    """`[*stack, o, i]` floats."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return self.array

    def axes(self, axes: Axes) -> list[Axes]:
        return [axes]

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix, ...]:
        return (KernelMatrix(self.array, self.array.dtype),)

    def select(self, index: Int[Array, ""]) -> Dense:
        """One matrix of a stack.

        XLA:CPU slices 16-bit floats in float32, and would widen the whole stack, once, before a loop over it. So their
        bits are sliced as integers, and the barrier ties that to the loop, out of which it would be moved as well.
        """
        stack = self.array
        if stack.dtype.itemsize != 2:
            return Dense(lax.dynamic_index_in_dim(stack, index, keepdims=False))
        stack, index = lax.optimization_barrier((stack, index))
        bits = lax.dynamic_index_in_dim(lax.bitcast_convert_type(stack, jnp.uint16), index, keepdims=False)
        return Dense(lax.bitcast_convert_type(bits, stack.dtype))


@dataclass(frozen=True)
class DenseKind:
    dtype: np.dtype
    block: ClassVar[int] = 1
    joins: ClassVar[bool] = True

    def abstract(self, shape: tuple[int, ...]) -> Dense:
        return Dense(jax.ShapeDtypeStruct(shape, self.dtype))

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Dense:
        return Dense(place(layout, (tensor.expand() for tensor in tensors), self.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fused(Weight):
    """Weights of different kinds above one another: one product made of several checkpoint tensors."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, _, inputs = self.parts[0].shape
        return (*stack, sum(part.shape[-2] for part in self.parts), inputs)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return jnp.concatenate([part.dequantize().astype(jnp.float32) for part in self.parts], axis=-2)

    def axes(self, axes: Axes) -> list[Axes]:
        return [leaf for part in self.parts for leaf in part.axes(axes)]

    @property
    def matrices(self) -> tuple[Any, ...] | None:
        return _joined([part.matrices for part in self.parts])

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix | PackedMatrix, ...] | None:
        return _joined([part.kernel_matrices for part in self.parts])

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return jnp.concatenate([part.matmul(x) for part in self.parts], axis=-1)

    def select(self, index: Int[Array, ""]) -> Fused:
        return Fused(tuple(part.select(index) for part in self.parts))


def _joined(parts: list[Any]) -> tuple[Any, ...] | None:
    return None if None in parts else tuple(matrix for part in parts for matrix in part)


TILE = 1 << 20
"""Weights that are expanded at a time: a tile of them stays in a CPU's cache between its expansion and its product."""


class Quantized(Weight):
    """A matrix whose arrays are all `[*stack, o / n, …]`: expanded a few rows at a time, never whole in a product."""

    @property
    def rows_together(self) -> int:
        """The `n` rows that are one of the arrays' rows."""
        return 1

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T`, accumulated and returned in float32; a tile of rows is expanded, multiplied and forgotten."""
        (rows, inputs), together = self.shape, self.rows_together
        count = rows // together
        tile = min(count, max(-(-8 // together), TILE // (together * inputs)))
        if tile == count:
            return self.product(x)

        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            start = jnp.minimum(index * tile, count - tile)  # the last tile may do some rows again
            part = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, tile), self)
            return lax.dynamic_update_slice_in_dim(out, part.product(x), start * together, 1)

        return lax.fori_loop(0, -(-count // tile), body, jnp.zeros((x.shape[0], rows), jnp.float32))

    def product(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`matmul` of a tile that may be expanded at once."""
        return product(x, self.dequantize().astype(x.dtype))

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        assert self.rows_together == 1
        return jax.tree.map(lambda array: array[ids], self).dequantize()

    def _heads(self, per_head: int, rows: slice) -> Float[Array, "H o i"]:
        if self.rows_together > 1:
            return super()._heads(per_head, rows)

        def of_heads(array: jax.Array) -> jax.Array:
            return rearrange(array, "(head row) ... -> head row ...", row=per_head)[:, rows]

        return jax.tree.map(of_heads, self).dequantize()


def fuse(parts: list[Weight]) -> Weight:
    """One weight of several; of one it is that one."""
    return parts[0] if len(parts) == 1 else Fused(tuple(parts))


def product(x: Float[Array, "T i"], matrix: Float[Array, "o i"]) -> Float[Array, "T o"]:
    """`x @ matrix.T` in the matrix's type, summed and given in float32: XLA:CPU's fast path for bfloat16."""
    return dot(x.astype(matrix.dtype), matrix)


def _by_head(x: Float[Array, "T H n"], matrix: Float[Array, "H o i"], contract: int) -> Float[Array, "T H m"]:
    """Each head times its matrix, summed in float32 over `contract`; heads go first, as XLA:CPU needs for bfloat16."""
    heads, numbers = x.swapaxes(0, 1).astype(matrix.dtype), (((2,), (contract,)), ((0,), (0,)))
    out = lax.dot_general(heads, matrix, numbers, precision(matrix), preferred_element_type=jnp.float32)
    return out.swapaxes(0, 1).astype(x.dtype)


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
