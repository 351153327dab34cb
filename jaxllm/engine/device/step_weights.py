"""What a step runs the model with: its weights as they travel, and what else the step's key names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.sharding.mesh import named_sharding, put
from jaxllm.weights.loader import ParamSpec, Value


class StepWeights(NamedTuple):
    """What a step runs the model with: the parts that its key names."""

    weights: Any
    adapters: Any = None
    """Tables, of a step that is adapted."""
    steering: Any = None
    processing: Any = None
    """The rows of `Processors`, of a step that is processed."""


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


def with_parts(step: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """A step that takes the parts of `StepWeights` of these names one by one, the weights first."""
    count = len(names)
    return lambda *given: step(StepWeights(**dict(zip(names, given[:count], strict=True))), *given[count:])
