"""What lives on the devices between steps: of what shapes, and how it lies on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.slots import Slots, slot_shapes
from jaxllm.models.caches import Buffer, Cache
from jaxllm.models.layers.steering import SteeringState
from jaxllm.sharding.mesh import DATA, EVERY, Axes
from jaxllm.weights.loader import ParamSpec


class DeviceState(NamedTuple):
    """What lives on the devices between steps; all of it is donated to the step that changes it."""

    caches: tuple[Cache, ...]
    """What each layer keeps of earlier tokens, in pages or by slot."""
    slots: Slots
    hidden: Any
    """[max_num_batched_tokens, E]: the backbone's last output; of no rows in a stage that hands its own on."""
    adapters: tuple[Any, ...] = ()
    """Tables of the adapters that are on the devices, in the model's order."""


class StateShapes:
    """The shapes and shardings of an engine's state, from which it is made."""

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        sizes: StepSizes,
        hidden_dtype: Any,
        tables: Sequence[ParamSpec] = (),
        processing_width: int = 0,
    ):
        """`tables` are those of adapters, where there are any; a row of `Processors` has the `processing_width`."""
        self._processing_width = processing_width
        self._mesh = mesh
        self._sizes = sizes
        self.hidden_dtype = hidden_dtype
        """Of the states that the head takes, and that one stage hands on to the next."""
        self._tables = tables

    def abstract(self) -> DeviceState:
        """All that every engine has."""
        s = self._sizes
        caches = jax.tree.map(
            lambda b: self.sharded(b.shape, b.dtype, b.axes), s.layers, is_leaf=lambda b: isinstance(b, Buffer)
        )
        shapes = slot_shapes(
            s.num_slots, s.max_model_len, s.pages_per_seq, s.vocab_size, s.adapter_places, s.remembered, s.kept_hidden
        )
        slots = Slots(*(self.replicated(a.shape, a.dtype) for a in shapes))
        adapters = tuple(self.sharded(t.shape, t.dtype, t.axes) for t in self._tables)
        hidden = s.max_num_batched_tokens if s.stage is None or s.stage.last else 0
        return DeviceState(caches, slots, self.hidden(hidden), adapters)

    def on_demand(self) -> dict[str, Any]:
        """What is there once some request needs it, a row for each slot: what steers requests, and which logits
        processors they use.
        """
        rows, layers = self._sizes.num_slots + 1, len(self._sizes.caches)
        ranges: Any = self.ints(rows, 2)
        steering = SteeringState(self.hidden(rows, layers), ranges)
        return {"steering": steering, "processing": self.ints(rows, self._processing_width)}

    def new(self) -> DeviceState:
        """The state of an engine that has no requests, on the devices."""
        state = self.abstract()

        def make() -> DeviceState:
            zeros = self._sizes.cache_layout.page_layout.zeros
            large = jax.tree.map(
                lambda a: zeros(a.sharding.shard_shape(a.shape), a.dtype), (state.caches, state.adapters)
            )
            rest = jax.tree.map(
                lambda a: jnp.zeros(a.sharding.shard_shape(a.shape), a.dtype), state._replace(caches=(), adapters=())
            )
            return rest._replace(caches=large[0], adapters=large[1])

        return self.jit(make, (), state_specs(state), donate=())()

    def new_on_demand(self, name: str) -> Any:
        """A part of `on_demand` that concerns nobody yet, on the devices."""
        part = self.on_demand()[name]

        def make() -> Any:
            return jax.tree.map(lambda a: jnp.zeros(a.sharding.shard_shape(a.shape), a.dtype), part)

        return self.jit(make, (), state_specs(part), donate=())()

    def hidden(self, *rows: int) -> Any:
        """Hidden states, so many."""
        return self.replicated((*rows, self._sizes.hidden_size), self.hidden_dtype)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """int32 numbers that every device of a batch has all of."""
        return self.replicated(shape, jnp.int32)

    def replicated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array that every device of a batch has all of."""
        return self.sharded(shape, dtype, ())

    def sharded(self, shape: tuple[int, ...], dtype: Any, axes: Axes) -> Any:
        """An array of each batch, whose axes the mesh divides by `axes`.

        Where several batches run side by side, theirs lie one after the other along the first axis, so that a batch's
        devices have an array of this shape, or their part of one. An empty array is nobody's, and has no parts.
        """
        if self.num_batches > 1 and all(shape):
            first, *others = axes or (None,)
            shape, axes = (self.num_batches * shape[0], *shape[1:]), (DATA if first is None else EVERY, *others)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, P(*axes)))

    def to_all(self, array: jax.ShapeDtypeStruct) -> Any:
        """What `sharded` gave, of which every device is to have all."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self._mesh, P()))

    @property
    def num_batches(self) -> int:
        """How many run side by side, each on its own part of the data axis."""
        return self._mesh.shape[DATA]

    def jit(self, step: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...]) -> Callable[..., Any]:
        """`step` on every device of the mesh at once, jitted; `inputs` and `outputs` say how its arrays lie on it."""
        mapped = jax.shard_map(step, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)


def state_specs(state: Any) -> Any:
    """How each array of a part of the state lies on the mesh."""
    return jax.tree.map(lambda a: a.sharding.spec, state)
