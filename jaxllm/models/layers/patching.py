"""What takes the place of the residual stream between layers, in some rows of a step.

Which rows of which layers is data, as it is for activations that are recorded: a step is compiled for a number of
patches, not for a choice of them. A step that patches nothing is traced without any of this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.ambient import holding


class LayerPatches(NamedTuple):
    """One layer's: the row of each patch, which is behind the last where the patch is another layer's."""

    rows: Int[Array, "n"]
    values: Float[Array, "n E"]

    def put(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The residual stream with the patches in their rows."""
        return x.at[self.rows].set(self.values.astype(x.dtype), mode="drop")


class StepPatches(NamedTuple):
    """All patches of a step. Unused ones are of the layer -1."""

    layers: Int[Array, "n"]
    rows: Int[Array, "n"]
    values: Float[Array, "n E"]

    def layer(self, index: int, x: Float[Array, "T E"]) -> LayerPatches:
        """What the layer `index` is told, whose residual stream is like `x`."""
        return LayerPatches(jnp.where(self.layers == index, self.rows, len(x)), self.values)


_step: ContextVar[StepPatches | None] = ContextVar("patches", default=None)
_layer: ContextVar[bool] = ContextVar("layer_patched", default=False)


def patching(patches: StepPatches | None) -> AbstractContextManager[StepPatches | None]:
    """While this is open, a model that is traced is patched; with None it is not."""
    return holding(_step, patches)


def step_patches() -> StepPatches | None:
    """The patches of the step that is traced; None where it has none."""
    return _step.get()


def patching_layer(patches: LayerPatches | None) -> AbstractContextManager[bool]:
    """While this is open, `patched` says whether there are any."""
    return holding(_layer, patches is not None)


def patched() -> bool:
    """Whether the layer that is traced is patched: it leaves nothing to be added to its output by the next one."""
    return _layer.get()
