"""What lives on the devices between steps: of what shapes, and how it lies on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import slot_shapes
from jaxllm.models.caches import Buffer
from jaxllm.sharding.mesh import DATA, EVERY, Axes

State = dict[str, Any]
"""What lives on the devices between steps, by name; all of it is donated to the step that changes it.

`caches` are what each layer keeps of earlier tokens, in pages or by slot; `slots` what is known of each sequence;
`hidden` `[max_num_batched_tokens, E]` the backbone's last output, of no rows in a stage that hands its own on. Features
may have parts by their own names."""


class StateShapes:
    """The shapes and shardings of an engine's state, from which it is made."""

    def __init__(self, mesh: Mesh | AbstractMesh, sizes: StepSizes, hidden_dtype: Any, features: Features):
        self._mesh = mesh
        self.sizes = sizes
        self.hidden_dtype = hidden_dtype
        """Of the states that the head takes, and that one stage hands on to the next."""
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
        """That many hidden states."""
        return self.replicated((*rows, self.sizes.hidden_size), self.hidden_dtype)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """int32 numbers that every device of a batch has all of."""
        return self.replicated(shape, jnp.int32)

    def replicated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array that every device of a batch has all of."""
        return self.sharded(shape, dtype, ())

    def sharded(self, shape: tuple[int, ...], dtype: Any, axes: Axes) -> Any:
        """An array of each batch, whose axes the mesh divides by `axes`.

        Where several batches run side by side, theirs lie one after the other along the first axis, so that a batch's
        devices have an array of this shape, or their part of one. An empty array has no parts.
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


def _filled(part: Any, zeros: Callable[..., jax.Array]) -> Any:
    return jax.tree.map(lambda a: zeros(a.sharding.shard_shape(a.shape), a.dtype), part)


def state_specs(state: Any) -> Any:
    """How each array of a part of the state lies on the mesh."""
    return jax.tree.map(lambda a: a.sharding.spec, state)
