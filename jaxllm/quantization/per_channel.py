"""Weights of eight bits with one scale for each output channel: integers, or floats of e4m3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8

from jaxllm.pallas_kernels.kernel_matrix import KernelMatrix
from jaxllm.pallas_kernels.rounded import RUN, quantize_runs
from jaxllm.quantization.coded import FP8, UINT8
from jaxllm.quantization.quantized import Quantized
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import product
from jaxllm.sharding.layout import Layout, place
from jaxllm.sharding.mesh import Axes

INT8 = np.dtype(np.int8)
LARGEST = {INT8: 127.0, FP8: float(ml_dtypes.finfo(FP8).max)}
"""The largest code of each type: it stands for the largest weight of a channel."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerChannel(Quantized):
    """`codes * scale`, a scale a row.

    Attributes:
        codes: int8 or float8_e4m3fn `[*stack, o, i]`.
        scale: float32 `[*stack, o]`.
        dtype: of the numbers that `rows` and `dequantize` give.
        activations: whether a product rounds its inputs to int8 as well, with a scale for each RUN of a row (W8A8).
    """

    codes: Any
    scale: Any
    dtype: np.dtype = field(metadata={"static": True})
    activations: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return (self.codes.astype(jnp.float32) * self.scale[..., None]).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [axes, axes[:-1]]

    @property
    def kernel_matrices(self) -> tuple[KernelMatrix, ...]:
        scale = self.scale[..., None]
        return (KernelMatrix(self.codes, self.dtype, scale, scale_columns=self.shape[-1], rounds=self.activations),)

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        return self._by_integers(x) if self.activations else super().matmul(x)

    def product(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """Codes are exact in every float type, so that scales come last, in float32."""
        return product(x, self.codes.astype(x.dtype)) * self.scale

    def _by_integers(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        codes, scale = quantize_runs(x)

        def add(run: jax.Array, total: jax.Array) -> jax.Array:
            return total + self._of_run(codes, scale, run * RUN, RUN)

        whole, rest = divmod(self.shape[-1], RUN)
        total = jnp.zeros((len(x), self.shape[0]), jnp.float32)
        if whole:
            total = lax.fori_loop(0, whole, add, total)
        if rest:
            total += self._of_run(codes, scale, whole * RUN, rest)
        return total * self.scale

    def _of_run(
        self, codes: Int8[Array, "T i"], scale: Float[Array, "T r"], start: jax.Array | int, size: int
    ) -> Float[Array, "T o"]:
        """What the inputs from `start` on add to the sums."""
        inputs, weights = (lax.dynamic_slice_in_dim(each, start, size, 1) for each in (codes, self.codes))
        sums = lax.dot_general(inputs, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * lax.dynamic_slice_in_dim(scale, start // RUN, 1, 1)


@dataclass(frozen=True)
class PerChannelKind:
    """Codes of one type, for a model that computes in `dtype`."""

    codes: np.dtype
    dtype: np.dtype
    activations: bool = False
    block: ClassVar[int] = 1
    joins: ClassVar[bool] = True

    def abstract(self, shape: tuple[int, ...]) -> PerChannel:
        scale = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return PerChannel(jax.ShapeDtypeStruct(shape, self.codes), scale, self.dtype, self.activations)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> PerChannel:
        """A checkpoint's own codes where they fit; else each row's largest weight becomes the largest code."""
        pairs = [self._taken(tensor) if self._holds(tensor) else self._encode(tensor) for tensor in tensors]
        codes = place(layout, (codes for codes, _ in pairs), self.codes)
        scale = place(layout, (scale for _, scale in pairs), np.dtype(np.float32))
        return PerChannel(codes, scale, self.dtype, self.activations)

    def _holds(self, tensor: Stored) -> bool:
        if tensor.codes is None or tensor.codes.order is not None:
            return False
        own = tensor.codes.coding
        integers = own.codes == UINT8 and own.bits == 8 and own.symmetric and not own.levels
        return own.block[1] >= tensor.shape[-1] and (integers if self.codes == INT8 else own.codes == FP8)

    def _taken(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray]:
        assert tensor.codes is not None
        scale = tensor.codes.scales(tensor.shape, (1, tensor.shape[-1]))[..., 0]
        codes = (tensor.data ^ np.uint8(128)).view(np.int8) if self.codes == INT8 else tensor.data
        return codes, scale

    def _encode(self, tensor: Stored) -> tuple[np.ndarray, np.ndarray]:
        kept = tensor.weight
        if isinstance(kept, PerChannel) and kept.codes.dtype == self.codes:
            return kept.codes, kept.scale
        values = tensor.finite()
        peak = np.maximum(values.max(axis=-1), -values.min(axis=-1))
        scale = np.where(peak > 0, peak / np.float32(LARGEST[self.codes]), 1).astype(np.float32)
        codes = values / scale[..., None]
        if self.codes == INT8:
            np.rint(codes, out=codes)
        return codes.astype(self.codes), scale
