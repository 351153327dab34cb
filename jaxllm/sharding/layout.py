"""How a sharded parameter is laid out from checkpoint tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Rows of one checkpoint tensor inside a fused parameter (channels, where the layout's axis is not the first).

    `rows` are the tensor's own rows; `shards` is how many different pieces they are cut into. With fewer shards than
    devices each piece is repeated, which is how KV heads are replicated where there are more devices than heads.
    """

    rows: int
    shards: int


@dataclass(frozen=True)
class Layout:
    """How a parameter is laid out from checkpoint tensors along one axis, device by device.

    Worked example, two devices, `q` of 4 rows in 2 shards and `k` of 2 rows in 1 shard:

        device 0: q0 q1 k0 k1      device 1: q2 q3 k0 k1      so the whole parameter has 8 rows
    """

    segments: tuple[Segment, ...]
    tp: int
    axis: int = 0
    pad_to: int = 0
    """Rows after zero padding (vocabularies); 0 is no padding."""

    @property
    def rows(self) -> int:
        return self.pad_to or sum(self.tp * s.rows // s.shards for s in self.segments)

    @property
    def stored_rows(self) -> int:
        """Rows as a checkpoint has them: without padding or replicas."""
        return sum(s.rows for s in self.segments)

    def assemble(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The whole parameter from one tensor a segment, or from one that holds them all in their order."""
        if self.pad_to:
            (tensor,) = tensors
            padding = [(0, 0)] * tensor.ndim
            padding[self.axis] = (0, self.pad_to - tensor.shape[self.axis])
            return np.pad(tensor, padding) if any(after for _, after in padding) else tensor
        if self.tp == 1:
            return tensors[0] if len(tensors) == 1 else np.concatenate(tensors, self.axis)
        if len(tensors) == 1:
            tensors = np.split(tensors[0], np.cumsum([s.rows for s in self.segments])[:-1], self.axis)
        parts = []
        for device in range(self.tp):
            for tensor, segment in zip(tensors, self.segments, strict=True):
                size = segment.rows // segment.shards
                shard = device * segment.shards // self.tp
                parts.append(np.take(tensor, range(shard * size, (shard + 1) * size), self.axis))
        return np.concatenate(parts, self.axis)


def split_rows(rows: int, tp: int) -> Layout:
    """One tensor cut into `tp` equal pieces."""
    return Layout((Segment(rows, tp),), tp)


def padded_rows(rows: int, tp: int, multiple: int = 64) -> Layout:
    """One tensor padded with zero rows until every device has the same, whole multiple of rows."""
    unit = multiple * tp
    return Layout((Segment(rows, tp),), tp, pad_to=math.ceil(rows / unit) * unit)


def place(layout: Layout | None, tensors: Iterable[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The whole parameter in `dtype`; each tensor is cast by itself, so that nothing wider is ever whole."""
    cast = [tensor.astype(dtype, copy=False) for tensor in tensors]
    return cast[0] if layout is None else layout.assemble(cast)
