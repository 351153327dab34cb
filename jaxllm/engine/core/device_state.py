"""The weights as they travel to steps, and the state that an engine keeps on its devices between steps."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import slot_shapes
from jaxllm.errors import CheckpointError
from jaxllm.models.caches import Buffer
from jaxllm.sharding.mesh import DATA, EVERY, Axes, named_sharding, put
from jaxllm.weights.loader import ParamSpec, Value

State = dict[str, Any]
"""Everything that lives on the devices between steps, by name; all of it is donated to the step that changes it.

`caches` are what each layer keeps of earlier tokens, in pages or by slot; `slots` what is known of each sequence;
`hidden` `[max_num_batched_tokens, E]` the backbone's last output, of no rows in a stage that hands its own on. Features
may have parts by their own names."""


class StateShapes:
    """The shapes and shardings of an engine's state, from which it is made."""

    def __init__(self, mesh: Mesh | AbstractMesh, sizes: StepSizes, hidden_dtype: Any, features: Features):
        self._mesh = mesh
        self.sizes = sizes
        self.hidden_dtype = hidden_dtype
        """The dtype of the states that the head takes, and that one stage hands on to the next."""
        self._features = features

    def abstract(self) -> State:
        """All that the engine has from its start."""
        s = self.sizes
        caches = jax.tree.map(
            lambda b: self.sharded(b.shape, b.dtype, b.axes), s.layers, is_leaf=lambda b: isinstance(b, Buffer)
        )
        slots = jax.tree.map(lambda a: self.replicated(a.shape, a.dtype), slot_shapes(s, self._features))
        hidden = s.max_num_batched_tokens if s.stage is None or s.stage.last else 0
        parts = {f.name: self.part(f) for f in self._features if f.has_part and not f.rare}
        return {"caches": caches, "slots": slots, "hidden": self.hidden(hidden), **parts}

    def part(self, feature: Feature) -> Any:
        """A feature's own part: by default a row for each slot of what it keeps there."""
        found = feature.part(self)
        if found is None:
            rows = feature.slot(self.sizes).items()
            found = {name: self.replicated((self.sizes.num_slots + 1, *row), dtype) for name, (row, dtype) in rows}
        return found

    def row_of(self, array: jax.ShapeDtypeStruct) -> Any:
        """One row of an array of the state, abstract."""
        spec = array.sharding.spec[1:]  # type: ignore[union-attr]
        return self.sharded(array.shape[1:], array.dtype, tuple(spec))

    def new(self) -> State:
        """The state of an engine that has no requests, on the devices."""
        state = self.abstract()
        zeros = self.sizes.cache_layout.page_layout.zeros

        def make() -> State:
            return {
                name: _filled(part, jnp.zeros if name in ("slots", "hidden") else zeros) for name, part in state.items()
            }

        return self.jit(make, (), state_specs(state), donate=())()  # type: ignore[no-any-return]

    def new_part(self, name: str) -> Any:
        """The part of a rare feature, which has no request yet, on the devices."""
        part = self.part(self._features[name])

        def make() -> Any:
            return _filled(part, jnp.zeros)

        return self.jit(make, (), state_specs(part), donate=())()

    def hidden(self, *rows: int) -> Any:
        """Abstract hidden states of this shape."""
        return self.replicated((*rows, self.sizes.hidden_size), self.hidden_dtype)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """int32 numbers that every device of a batch has all of."""
        return self.replicated(shape, jnp.int32)

    def replicated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array that every device of a batch has all of."""
        return self.sharded(shape, dtype, ())

    def sharded(self, shape: tuple[int, ...], dtype: Any, axes: Axes) -> Any:
        """An array of each batch, whose axes the mesh divides by `axes`.

        If several batches run side by side, their arrays lie one after the other along the first axis, so that a
        batch's devices have an array of this shape, or their part of one. An empty array has no parts.
        """
        if self.num_batches > 1 and all(shape):
            first, *others = axes or (None,)
            shape, axes = (self.num_batches * shape[0], *shape[1:]), (DATA if first is None else EVERY, *others)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, P(*axes)))

    def to_all(self, array: jax.ShapeDtypeStruct) -> Any:
        """The same array, of which every device has all."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self._mesh, P()))

    @property
    def num_batches(self) -> int:
        """The number of batches side by side, each on its own part of the data axis."""
        return self._mesh.shape[DATA]

    def jit(self, step: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...]) -> Callable[..., Any]:
        """`step` on every device of the mesh at once, jitted; `inputs` and `outputs` say how its arrays lie on it."""
        mapped = jax.shard_map(step, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)


def _filled(part: Any, zeros: Callable[..., jax.Array]) -> Any:
    return jax.tree.map(lambda a: zeros(a.sharding.shard_shape(a.shape), a.dtype), part)


def state_specs(state: Any) -> Any:
    """The sharding of each array of a part of the state."""
    return jax.tree.map(lambda a: a.sharding.spec, state)


class WeightPacking:
    """Fewer arguments, quicker dispatch: all small replicated vectors (norms, biases) travel as one.

    The packed tuple is that vector, then every other array of the parameters in its own order. If kernels take norms
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
        return (vector, *(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, sharding=x.sharding(mesh)) for x in large))

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


_ALIGNMENT = 64
"""Bytes, of an array's place in the file: XLA takes an array of a mapped file as it is, where a CPU runs it."""


def keep(file: BinaryIO, weights: Iterable[jax.Array], owner: str = "") -> None:
    """Write each array's bytes, one after the other, and at the end what they are and whose."""
    file.seek(0)
    file.truncate()
    kept = []
    for array in weights:
        file.write(_bytes_of(np.asarray(array)))
        file.write(bytes(-array.nbytes % _ALIGNMENT))
        kept.append(jax.ShapeDtypeStruct(array.shape, array.dtype))
    listed = _listed(kept, owner)
    file.write(listed + _TRAILER.pack(len(listed)))
    file.flush()


def map_kept(file: BinaryIO, wanted: Sequence[jax.ShapeDtypeStruct], owner: str = "") -> list[np.ndarray]:
    """The arrays that `keep` has written, mapped. Raises ValueError: the file has others, or is of another owner."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # processes share the file's position
    start = len(mapped) - _TRAILER.size
    length = _TRAILER.unpack_from(mapped, start)[0] if start > 0 else 0
    places = list(itertools.accumulate((nbytes_kept(array) for array in wanted), initial=0))
    if places[-1] + length != start or mapped[places[-1] : start] != _listed(wanted, owner):
        raise ValueError("they are of another plan")
    raw = np.frombuffer(mapped, np.uint8)
    return [
        raw[place : place + array.size * array.dtype.itemsize].view(array.dtype).reshape(array.shape)
        for place, array in zip(places, wanted, strict=False)
    ]


def nbytes_kept(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """The bytes that an array takes in a file of `keep`."""
    nbytes = array.size * array.dtype.itemsize
    return nbytes + -nbytes % _ALIGNMENT


@dataclass(frozen=True)
class Kept:
    """The file in which a process finds what another has left there.

    If it is `shared`, other processes take the same, at the same time, and whoever started them empties it.
    """

    file: BinaryIO
    shared: bool = False

    @property
    def is_there(self) -> bool:
        """A process has left its weights."""
        return os.fstat(self.file.fileno()).st_size > 0

    def take(self, wanted: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
        """Read them onto the devices, the last one first: the file ends before each that has been read.

        No more than one array exists twice at a time, unless the file is shared. `wanted` says what they are, and where
        they go.

        Raises:
            CheckpointError: the file has something else; it is empty then, unless it is shared.
        """
        try:
            arrays = map_kept(self.file, wanted)
        except (ValueError, OSError) as error:
            self._end_at(0)
            raise CheckpointError(f"the weights that were kept in memory cannot be used: {error}") from None
        taken, end = [], sum(map(nbytes_kept, wanted))
        while arrays:
            array, kept = wanted[len(arrays) - 1], arrays.pop()
            taken.append(jax.device_put(np.array(kept), array.sharding))
            del kept
            end -= nbytes_kept(array)
            self._end_at(end)
        return tuple(reversed(taken))

    def _end_at(self, length: int) -> None:
        if not self.shared:
            self.file.truncate(length)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _listed(arrays: Iterable[jax.ShapeDtypeStruct], owner: str) -> bytes:
    return json.dumps([owner, [(array.shape, str(array.dtype)) for array in arrays]]).encode()
