"""A model's weights as they travel to steps, and as one process leaves them to the next."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.errors import CheckpointError
from jaxllm.sharding.mesh import named_sharding, put
from jaxllm.weights.loader import ParamSpec, Value


class WeightPacking:
    """Fewer arguments, quicker dispatch: all small replicated vectors (norms, biases) travel as one.

    The packed tuple is that vector, then every other array of the parameters in its own order. Where kernels take norms
    (`joins` is False), each vector travels by itself: a part of a larger one would be copied out for them.
    """

    def __init__(self, specs: Sequence[ParamSpec], joins: bool = True):
        self._leaves = [leaf for spec in specs for leaf in spec.leaves()]
        self._small = [
            i
            for i, leaf in enumerate(self._leaves)
            if joins and leaf.array.ndim == 1 and not any(leaf.axes) and leaf.array.dtype == np.float32
        ]
        small = set(self._small)
        self._large = [i for i in range(len(self._leaves)) if i not in small]
        self._offsets = np.cumsum([0, *(self._leaves[i].array.shape[0] for i in self._small)]).tolist()

    def abstract(self, mesh: Mesh | AbstractMesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the packed tuple."""
        vector = jax.ShapeDtypeStruct((self._offsets[-1],), jnp.float32, sharding=NamedSharding(mesh, P()))
        large = (self._leaves[i] for i in self._large)
        return (
            vector,
            *(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, sharding=x.sharding(mesh)) for x in large),
        )

    def pack(self, parameters: Sequence[Value], mesh: Mesh) -> tuple[jax.Array, ...]:
        """The model's parameters on `mesh` -> the packed tuple."""
        arrays = jax.tree.leaves(parameters)
        vectors = [arrays[i] for i in self._small]
        small = jnp.concatenate(vectors) if vectors else put(np.zeros(0, np.float32), named_sharding(mesh, ()))
        return (small, *(arrays[i] for i in self._large))

    def replace(self, packed: list[jax.Array], changed: Mapping[int, np.ndarray], mesh: Mesh) -> tuple[jax.Array, ...]:
        """`packed` with other numbers in some arrays of the parameters, which `changed` has by their places.

        Each old array leaves `packed` before the new one is put onto the devices: there is no more than one twice.
        """
        small = {index: changed[index] for index in self._small if index in changed}
        if small:
            vector = np.array(packed[0])
            for index, start, end in zip(self._small, self._offsets, self._offsets[1:], strict=False):
                if index in small:
                    vector[start:end] = small[index]
            packed[0] = put(vector, named_sharding(mesh, ()))
        for place, index in enumerate(self._large, start=1):
            if index in changed:
                del packed[place]
                packed.insert(place, put(changed[index], self._leaves[index].sharding(mesh)))
        return tuple(packed)

    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The packed tuple -> every array of the parameters; inside a traced function."""
        vector, large = packed[0], dict(zip(self._large, packed[1:], strict=True))
        ends = zip(self._small, self._offsets, self._offsets[1:], strict=False)
        small = {index: vector[start:end] for index, start, end in ends}
        arrays = small | large
        return [arrays[index] for index in range(len(self._leaves))]


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
