"""The memory of a model's layers for earlier tokens, as each layer states it, and the buffers which that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.pages import BY_HEAD, QUANTIZED, SCALE_BYTES, PageLayout
from jaxllm.sharding.mesh import TENSOR, Axes, num_pieces


@dataclass(frozen=True)
class Paged:
    """Keys and values of every token, in pages that all paged layers find through one page table.

    Attributes:
        heads: KV heads.
        dims: channels of a key and a value, or of a latent alone.
        window: how many tokens back a token sees; None is all of them.
        chunked: it sees those from the last multiple of `window` on instead.
    """

    heads: int
    dims: tuple[int, ...]
    window: int | None = None
    chunked: bool = False


class Repeated(NamedTuple):
    """That many `channels` of an array belong to `groups`, of which each device needs at least one whole."""

    channels: int
    groups: int


@dataclass(frozen=True)
class PerSlot:
    """A state of fixed size for each sequence, in float32: the last inputs of a convolution, or a recurrence's.

    Attributes:
        shapes: of one sequence's arrays, over all devices.
        sharded: the axis of each array that devices share; None where every device has all of it.
        repeated: of each array, what more than one device has where they are more than there are groups of it.
    """

    shapes: tuple[tuple[int, ...], ...]
    sharded: tuple[int | None, ...]
    repeated: tuple[Repeated | None, ...] = ()


@dataclass(frozen=True)
class Shared:
    """Nothing of its own: the layer reads what an earlier one keeps."""

    layer: int


@dataclass(frozen=True)
class Joined:
    """The cache of a layer of several mixers: the buffers of each, one after the other."""

    specs: tuple[Paged | PerSlot, ...]


CacheSpec = Paged | PerSlot | Joined | Shared | None  # what one layer keeps; None is nothing


def parts_of(specs: Iterable[CacheSpec]) -> list[Paged | PerSlot]:
    """The caches that layers have of their own, those of several mixers one by one."""
    found: list[Paged | PerSlot] = []
    for spec in specs:
        found += spec.specs if isinstance(spec, Joined) else (spec,) if isinstance(spec, (Paged, PerSlot)) else ()
    return found


Cache = tuple[Any, ...]  # one layer's buffers, as the layer finds them in a step


class Buffer(NamedTuple):
    """An array on the devices: its shape over all of them, and which mesh axis divides which of its axes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes

    def bytes_per_device(self, tp: int) -> int:
        """Bytes of it on one of `tp` devices."""
        return math.prod(self.shape) * self.dtype.itemsize // num_pieces(self.axes, tp)


@dataclass(frozen=True)
class CacheLayout:
    """The layout of an engine's caches on its devices.

    Attributes:
        page_dtype: of the numbers in pages; quantized ones have a scale after each row.
        page_size: tokens in one page.
        tp: devices that share each layer; KV heads are replicated where there are more devices than heads.
    """

    page_dtype: np.dtype
    page_size: int
    tp: int = 1
    page_layout: PageLayout = BY_HEAD

    def buffers(self, spec: CacheSpec, num_pages: int, num_states: int) -> tuple[Buffer, ...]:
        """The buffers of a layer for `num_pages` pages and the states of `num_states` sequences."""
        if isinstance(spec, Joined):
            return tuple(buffer for part in spec.specs for buffer in self.buffers(part, num_pages, num_states))
        if isinstance(spec, Paged):
            scale = SCALE_BYTES if self.page_dtype in QUANTIZED.values() else 0
            heads, dims = max(spec.heads, self.tp), [dim + scale for dim in spec.dims]
            axes = (*[None] * self.page_layout.heads_axis, TENSOR)
            shapes = self.page_layout.shapes(num_pages, self.page_size, heads, dims)
            return tuple(Buffer(shape, self.page_dtype, axes) for shape in shapes)
        if isinstance(spec, PerSlot):
            repeated = spec.repeated or (None,) * len(spec.shapes)
            arrays = zip(spec.shapes, spec.sharded, repeated, strict=True)
            return tuple(self._states(num_states, *array) for array in arrays)
        return ()

    def _states(self, count: int, shape: tuple[int, ...], axis: int | None, repeated: Repeated | None) -> Buffer:
        further = 0 if repeated is None else repeated.channels * max(self.tp - repeated.groups, 0) // repeated.groups
        sizes = [size + further * (i == axis) for i, size in enumerate(shape)]
        axes = (TENSOR if axis == i else None for i in range(len(shape)))
        return Buffer((count, *sizes), np.dtype(jnp.float32), (None, *axes))

    def page_bytes(self, specs: Sequence[CacheSpec]) -> int:
        """Bytes of one page in all layers of a device."""
        return self._bytes(specs, 1, 0)

    def state_bytes(self, specs: Sequence[CacheSpec]) -> int:
        """Bytes of one sequence's states in all layers of a device."""
        return self._bytes(specs, 0, 1)

    def _bytes(self, specs: Sequence[CacheSpec], num_pages: int, num_states: int) -> int:
        found = (buffer for spec in specs for buffer in self.buffers(spec, num_pages, num_states))
        return sum(buffer.bytes_per_device(self.tp) for buffer in found)
