"""Weights that a process leaves in a file for the next one of the same plan, in the form that steps take them."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import jax
import numpy as np

from jaxllm.errors import CheckpointError

_TRAILER = struct.Struct("<Q")
"""The length of what stands before it: the list of what is kept."""


def keep(file: BinaryIO, weights: Sequence[jax.Array]) -> None:
    """Write each array's bytes, one after the other, and what they are."""
    file.seek(0)
    file.truncate()
    for array in weights:
        file.write(_bytes_of(np.asarray(array)))
    listed = _listed(weights)
    file.write(listed + _TRAILER.pack(len(listed)))
    file.flush()


@dataclass(frozen=True)
class Kept:
    """The file in which a process finds what another has left there.

    Where it is `shared` other processes take the same, at the same time, and whoever started them empties it.
    """

    file: BinaryIO
    shared: bool = False

    @property
    def is_there(self) -> bool:
        """Whether a process has left its weights."""
        return os.fstat(self.file.fileno()).st_size > 0

    def take(self, wanted: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
        """Read them onto the devices, the last one first: the file ends before each that has been read.

        So there is no more than one of them twice, unless it is shared. `wanted` says what they are, and where they go.

        Raises:
            CheckpointError: the file has something else; it is empty then, unless it is shared.
        """
        try:
            mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)  # processes share the file's position
            end = len(mapped) - _TRAILER.size
            (length,) = _TRAILER.unpack(mapped[max(end, 0) :])
            start = end - length
            if start < 0 or mapped[start:end] != _listed(wanted):
                raise ValueError("they are of another plan")
        except (struct.error, ValueError, OSError) as error:
            self._end_at(0)
            raise CheckpointError(f"the weights that were kept in memory cannot be used: {error}") from None
        taken = []
        for array in reversed(wanted):
            host = np.empty(array.shape, array.dtype)
            start -= host.nbytes
            if start < 0:
                raise CheckpointError("the weights that were kept in memory are cut short")
            if host.size:
                host.reshape(-1).view(np.uint8)[:] = np.frombuffer(mapped, np.uint8, host.nbytes, start)
            taken.append(jax.device_put(host, array.sharding))
            self._end_at(start)
        return tuple(reversed(taken))

    def _end_at(self, length: int) -> None:
        if not self.shared:
            self.file.truncate(length)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _listed(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> bytes:
    return json.dumps([(array.shape, str(array.dtype)) for array in arrays]).encode()
