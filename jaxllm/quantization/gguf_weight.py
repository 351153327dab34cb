"""Weights kept as GGUF's blocks, which may be made of a checkpoint's codes: of 32 that hold the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.errors import CheckpointError
from jaxllm.pallas_kernels.matrices import E2M1
from jaxllm.quantization.gguf_decode import FORMATS, IQ4_LEVELS, decode, iq4_scales
from jaxllm.quantization.gguf_encode import encode
from jaxllm.quantization.stored import E8M0, UINT8, Codes, Coding, Stored
from jaxllm.quantization.weight import Quantized
from jaxllm.sharding.mesh import Axes, Layout, place


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
            if self.type == "MXFP4":
                _check_powers(blocks[..., 0], tensor.origin)
            for start in FORMATS[self.type].halves:
                halves = blocks[..., start : start + 2].view(np.uint16)
                # With the sign shifted out, infinity is 0xf800.
                if np.max(halves << 1, initial=0) >= 0xF800:
                    raise CheckpointError(f"{tensor.origin}: not all scales of its {self.type} blocks are finite")
            return blocks
        if tensor.codes is not None and block_type(tensor.codes.coding) == self.type and tensor.codes.order is None:
            return coded_blocks(tensor.data, tensor.codes, self.type, tensor.origin)
        return encode(tensor.finite(), self.type, tensor.importance)


IQ4_CODINGS = {
    type: Coding(4, (1, 32), np.dtype(scale), levels=IQ4_LEVELS)
    for type, scale in (("IQ4_NL", np.float16), ("IQ4_XS", np.float32))
}
"""What holds the numbers of these blocks for kernels that know codes with levels, and not blocks."""


def as_codes(tensor: Stored) -> Stored:
    """Blocks of a type in IQ4_CODINGS as codes; others are what they were. Raises CheckpointError: as `pack`."""
    if not tensor.packed or tensor.dtype not in IQ4_CODINGS:
        return tensor
    blocks, coding = GgufKind(tensor.dtype, np.dtype(np.float32)).pack([tensor], None).blocks, IQ4_CODINGS[tensor.dtype]
    codes = FORMATS[tensor.dtype].codes(blocks).reshape(tensor.shape)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    if tensor.dtype == "IQ4_XS":
        scale = scale.astype(np.float32) * (iq4_scales(blocks[..., 2:8]).astype(np.float32) - 32)
    scale = scale.reshape(*tensor.shape[:-1], -1)
    return tensor._replace(data=codes, packed=False, codes=Codes(coding, scale))


BLOCK = 32
E8M0_NAN = 0xFF
HALVES = ("float16", "bfloat16", "float8_e8m0fnu")
"""Scales that a block's float16 holds: bfloat16 is narrower, but for scales under 2^-17, which round to 2^-24."""


def block_type(coding: Coding) -> str | None:
    """The GGML type whose blocks hold such numbers exactly; None if there is none.

    Q5_0 counts from -16 to 15: what is left of four bits once a zero point is taken off, or twice a four-bit float.
    """
    if coding.codes != UINT8 or coding.block[1] % BLOCK or coding.scale.name not in HALVES:
        return None
    if coding.levels == E2M1 and coding.scale == E8M0:
        return "MXFP4"
    if coding.levels:
        doubled = 2 * np.asarray(coding.levels)
        return "Q5_0" if (np.rint(doubled) == doubled).all() and np.abs(doubled).max() < 16 else None
    if coding.bits <= 4:
        return "Q4_0" if coding.symmetric else "Q5_0"
    return "Q8_0" if coding.symmetric else None


def _check_powers(exponents: np.ndarray, origin: str) -> None:
    if (exponents == E8M0_NAN).any():
        raise CheckpointError(f"{origin}: not all scales of its MXFP4 blocks are numbers")


def coded_blocks(data: np.ndarray, codes: Codes, type: str, origin: str) -> np.ndarray:
    """Blocks `[*stack, o, i / 32, bytes]` of the codes. Raises CheckpointError: a scale is more than float16 holds."""
    coding, block = codes.coding, (1, BLOCK)
    if type == "MXFP4":
        powers = codes.scales(data.shape, block).view(np.uint8)[..., None]
        _check_powers(powers, origin)
        low, high = np.split(data.reshape(*data.shape[:-1], -1, BLOCK), 2, axis=-1)
        return np.concatenate([powers, low | high << 4], axis=-1)
    groups = data.reshape(*data.shape[:-1], -1, BLOCK)
    scale = codes.scales(data.shape, block).astype(np.float32)
    if coding.levels:
        numbers = np.rint(2 * np.asarray(coding.levels)).astype(np.int16)[groups]
        scale = scale * np.float32(0.5)
    else:
        numbers = groups.astype(np.int16) - codes.zeros(data.shape, block)[..., None]
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(f"{origin}: its largest scale, {np.max(scale):g}, is more than float16 holds")
    if type == "Q8_0":
        return np.concatenate([halves[..., None].view(np.uint8), numbers.astype(np.int8).view(np.uint8)], axis=-1)
    raised = (numbers + FORMATS[type].offset).astype(np.uint8)
    low, high = np.split(raised & 15, 2, axis=-1)
    fifth = [np.packbits(raised >> 4, axis=-1, bitorder="little")] if type == "Q5_0" else []
    return np.concatenate([halves[..., None].view(np.uint8), *fifth, low | high << 4], axis=-1)
