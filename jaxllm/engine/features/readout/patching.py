"""What takes the place of the residual stream between layers, in some rows of a step.

Which rows of which layers is data, as it is for activations that are captured: a step is compiled for a number of
patches, not for a choice of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key, room
from jaxllm.engine.core.request import Chunk, Request
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import EngineRequest
from jaxllm.models.layers.hands import Hand, LayerHand
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.steering import Patching


class _RowPatch(NamedTuple):
    """One row of a step's tokens that gets another value as it leaves a layer."""

    row: int
    layer: int
    value: np.ndarray


class PatchingFeature(Feature):
    """A step with it is sent the layer and the row of each patch, and the values, float32 `[n, E]`."""

    name = "patching"
    on = ("backbone",)
    rare = True
    rooms = (4, 32, 256, 2048, 16384, 131072, 1048576)

    def prepare(self, request: Request, asked: EngineRequest) -> Patching | None:
        return asked.patching

    def amount(self, extra: Patching) -> int:
        return len(extra.places)

    def salt(self, extra: Patching) -> str:
        return extra.digest

    def apart(self, request: Request, extra: Patching, tokens: range) -> bool:
        return any(position in tokens for position, _ in extra.places)

    def needed(self, chunks: Sequence[Chunk]) -> int:
        return len(self._patches(chunks))

    def _patches(self, chunks: Sequence[Chunk]) -> list[_RowPatch]:
        """Those of a step whose tokens are those of `chunks`, one after another."""
        found, row = [], 0
        for chunk in chunks:
            patches = chunk.request.extras.get(self.name)
            if patches is not None:
                for index in patches.among(range(chunk.start, chunk.start + chunk.length)):
                    position, layer = patches.places[index]
                    found.append(_RowPatch(row + position - chunk.start, layer, patches.rows[index]))
            row += chunk.length
        return found

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        count = room(key.variant, self.name)
        return {"patch_layers": (count,), "patch_rows": (count,)}

    def sent(self, key: Key, state: StateShapes) -> tuple[Any, ...]:
        return (state.replicated((room(key.variant, self.name), state.sizes.hidden_size), jnp.float32),)

    def padding(self, key: Key, x: Fields) -> None:
        x["patch_layers"][:] = -1

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        patches = self._patches(chunks)
        self.padding(key, x)
        x["patch_layers"][: len(patches)] = [patch.layer for patch in patches]
        x["patch_rows"][: len(patches)] = [patch.row for patch in patches]
        values = np.zeros((room(key.variant, self.name), len(patches[0].value)), np.float32)
        values[: len(patches)] = [patch.value for patch in patches]
        return (values,)

    def traced(self, step: TracedStep) -> Traced:
        return _Patching(step)


class _LayerPatches(NamedTuple):
    """One layer's: the row of each patch, which is after the last where the patch is another layer's."""

    rows: Int[Array, "n"]
    values: Float[Array, "n E"]


class _LayerPatching(LayerHand):
    whole = True
    data: _LayerPatches

    def end(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return x.at[self.data.rows].set(self.data.values.astype(x.dtype), mode="drop")


class _Patching(Traced, Hand):
    layers = _LayerPatching

    def __init__(self, step: TracedStep):
        self._layers, self._rows, (self._values,) = step.x["patch_layers"], step.x["patch_rows"], step.sent

    def hand(self, meta: StepMetadata) -> Hand:
        return self

    def layer(self, index: int, x: jax.Array) -> _LayerPatches:
        return _LayerPatches(jnp.where(self._layers == index, self._rows, len(x)), self._values)
