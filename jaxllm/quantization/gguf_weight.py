"""Weights kept as GGUF's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.errors import CheckpointError
from jaxllm.quantization.coded_blocks import block_type, coded_blocks
from jaxllm.quantization.gguf_decode import FORMATS, decode
from jaxllm.quantization.gguf_encode import encode
from jaxllm.quantization.quantized import Quantized
from jaxllm.quantization.stored import Stored
from jaxllm.sharding.layout import Layout, place
from jaxllm.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GgufBlocks(Quantized):
    """GGUF's blocks byte for byte as the file has them.

    Attributes:
        blocks: uint8 `[*stack, o, i / elements, bytes]`.
        type: GGML's name of the block's type: "Q4_K".
        dtype: of the numbers that `rows` and `dequantize` give.
    """

    blocks: Any
    type: str = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, count, _ = self.blocks.shape
        return (*lead, count * FORMATS[self.type].elements)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        return decode(self.blocks, self.type).astype(self.dtype)

    def axes(self, axes: Axes) -> list[Axes]:
        return [(*axes, None)]


@dataclass(frozen=True)
class GgufKind:
    """Blocks of one GGML type, for a model that computes in `dtype`."""

    type: str
    dtype: np.dtype
    joins: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return FORMATS[self.type].elements

    def abstract(self, shape: tuple[int, ...]) -> GgufBlocks:
        elements, nbytes, *_ = FORMATS[self.type]
        blocks = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // elements, nbytes), jnp.uint8)
        return GgufBlocks(blocks, self.type, self.dtype)

    def pack(self, tensors: Sequence[Stored], layout: Layout | None) -> GgufBlocks:
        """The file's own blocks where they are of this type, or its codes as such blocks; others are encoded."""
        blocks = place(layout, (self._blocks(tensor) for tensor in tensors), np.dtype(np.uint8))
        return GgufBlocks(blocks, self.type, self.dtype)

    def _blocks(self, tensor: Stored) -> np.ndarray:
        if tensor.packed and tensor.dtype == self.type:
            blocks = tensor.by_rows.reshape(*tensor.shape[:-1], -1, FORMATS[self.type].nbytes)
            for start in FORMATS[self.type].scales:
                if not _finite_halves(blocks, start):
                    raise CheckpointError(f"{tensor.origin}: not all scales of its {self.type} blocks are finite")
            return blocks
        if tensor.codes is not None and block_type(tensor.codes.coding) == self.type and tensor.codes.order is None:
            return coded_blocks(tensor.data, tensor.codes, self.type, tensor.origin)
        return encode(tensor.finite(), self.type, tensor.importance)


def _finite_halves(blocks: np.ndarray, start: int) -> bool:
    """Whether the halves at byte `start` of every block are numbers: with the sign shifted out, infinity is 0xf800."""
    halves = blocks[..., start : start + 2].view(np.uint16)
    return halves.size == 0 or bool(np.max(halves << 1) < 0xF800)
