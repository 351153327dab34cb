"""FP8 weights with one scale for each block of rows and columns (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.kernel_matrix import KernelMatrix
from jaxllm.quantization.coded import FP8
from jaxllm.quantization.quantized import TILE
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import Weight, product
from jaxllm.sharding.layout import Layout, place
from jaxllm.sharding.mesh import Axes

FLOAT32 = np.dtype(np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Blocks(Weight):
    """`codes * scale`, a scale a block.

    Attributes:
        codes: float8_e4m3fn `[*stack, o / rows, rows, i]`.
        scale: float32 `[*stack, o / rows, i / columns]`.
        dtype: of the numbers that `rows` and `dequantize` give.
    """

    codes: Any
    scale: Any
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, blocks, rows, inputs = self.codes.shape
        return (*stack, blocks * rows, inputs)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        rows = self.codes.shape[-2]
        codes = self.codes.astype(jnp.float32).reshape(*self.scale.shape[:-1], rows, self.scale.shape[-1], -1)
        return (codes * self.scale[..., None, :, None]).reshape(self.shape).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [(*axes[:-1], None, axes[-1]), axes]

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix, ...]:
        rows, inputs = self.codes.shape[-2:]
        codes = self.codes.reshape(self.shape)
        columns = inputs // self.scale.shape[-1]
        return (KernelMatrix(codes, self.dtype, self.scale, scale_rows=rows, scale_columns=columns),)

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T`, accumulated and returned in float32; some blocks are expanded, multiplied and forgotten."""
        blocks, rows, inputs = self.codes.shape
        tile = min(blocks, max(1, TILE // (rows * inputs)))
        if tile == blocks:
            return product(x, self.dequantize().astype(x.dtype))

        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            start = jnp.minimum(index * tile, blocks - tile)  # the last tile may do some blocks again
            part = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, tile), self)
            found = product(x, part.dequantize().astype(x.dtype))
            return lax.dynamic_update_slice_in_dim(out, found, start * rows, 1)

        return lax.fori_loop(0, -(-blocks // tile), body, jnp.zeros((x.shape[0], blocks * rows), jnp.float32))

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        """The rows `ids` of a matrix; no other is expanded."""
        block, row = jnp.divmod(ids, self.codes.shape[-2])
        return Fp8Blocks(self.codes[block, row][:, None], self.scale[block], self.dtype).dequantize()


@dataclass(frozen=True)
class Fp8BlocksKind:
    """Blocks of `rows` by `block`, for a model that computes in `dtype`; only checkpoints that have such give them."""

    dtype: np.dtype
    rows: int
    block: int
    joins: ClassVar[bool] = True

    def abstract(self, shape: tuple[int, ...]) -> Fp8Blocks:
        *stack, outputs, inputs = shape
        blocks = (*stack, outputs // self.rows)
        codes = jax.ShapeDtypeStruct((*blocks, self.rows, inputs), FP8)
        return Fp8Blocks(codes, jax.ShapeDtypeStruct((*blocks, inputs // self.block), jnp.float32), self.dtype)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> Fp8Blocks:
        """The checkpoint's own numbers, laid out by blocks of rows."""
        if layout is not None:
            segments = tuple(replace(segment, rows=segment.rows // self.rows) for segment in layout.segments)
            layout = replace(layout, segments=segments, pad_to=layout.pad_to // self.rows)
        codes = place(layout, (t.data.reshape(*t.shape[:-2], -1, self.rows, t.shape[-1]) for t in tensors), FP8)
        scale = place(layout, map(self._scale, tensors), FLOAT32)
        return Fp8Blocks(codes, scale, self.dtype)

    def _scale(self, tensor: Stored) -> np.ndarray:
        if isinstance(tensor.weight, Fp8Blocks):
            return tensor.weight.scale
        assert tensor.codes is not None
        return tensor.codes.scales(tensor.shape, (self.rows, self.block))
