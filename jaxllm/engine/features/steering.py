"""What is added to the residual stream between layers, or takes its place, for some tokens of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key, room
from jaxllm.engine.core.packing import SETTING_INTS
from jaxllm.engine.core.request import Chunk, Request
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import EngineRequest
from jaxllm.models.layers.hands import Hand, LayerHand
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.steering import Patching, Steering


class SteeringFeature(Feature):
    """Its part of the device's state: `vectors` [slots, L, E], and `ranges` [slots, 2]: the first position that is
    steered, and the first after it that is not.
    """

    name = "steering"
    on = ("decode", "verify", "backbone")
    rare = has_part = True
    asked_by = ("steering",)

    def part(self, state: StateShapes) -> Any:
        rows, layers = state.sizes.num_slots + 1, len(state.sizes.caches)
        return {"ranges": state.ints(rows, 2), "vectors": state.hidden(rows, layers)}

    def prepare(self, request: Request, asked: EngineRequest) -> Steering | None:
        return asked.steering

    def needs(self, request: Request, extra: Steering) -> Iterable[Key]:
        return [Key("put", 0, frozenset({self.name}))]

    def salt(self, extra: Steering) -> str:
        return extra.digest

    def seat(self, request: Request, extra: Steering) -> None:
        sizes, device = self.around.sizes, self.around.device
        vectors = np.zeros((len(sizes.caches), sizes.hidden_size), device.hidden_dtype)
        vectors[list(extra.layers)] = extra.rows()
        ends = np.array([extra.start, extra.stop], np.int32)
        device.run(Key("put", 0, frozenset({self.name})), np.array([request.slot], np.int32), ends, vectors)

    def traced(self, step: TracedStep) -> Traced:
        return _Steering(step, self.name, self.bit)


class _Steering(Traced):
    def __init__(self, step: TracedStep, name: str, bit: int):
        self._state, self._bit = step.parts[name], bit
        self._settings = step.parts["slots"].setting_ints

    def hand(self, meta: StepMetadata) -> Hand:
        """The row of padding is zero, and stands for every token that is not steered."""
        assert meta.slots is not None, "steering is by slot"
        slots = meta.slots[jnp.minimum(meta.seq_ids, len(meta.slots) - 1)]
        first, end = self._state["ranges"][slots].T
        uses = SETTING_INTS.unpack(self._settings[slots])["uses"] & self._bit > 0
        steered = uses & meta.live & (first <= meta.positions) & (meta.positions < end)
        return _StepSteering(self._state["vectors"], jnp.where(steered, slots, len(self._state["ranges"]) - 1))


class _LayerVectors(NamedTuple):
    """One layer's vectors, and each token's row of them."""

    vectors: Float[Array, "slots E"]
    rows: Int[Array, "T"]


class _LayerSteering(LayerHand):
    data: _LayerVectors

    def end(self, x: jax.Array) -> jax.Array:
        return x + self.data.vectors[self.data.rows].astype(x.dtype)


class _StepSteering(Hand):
    layers = _LayerSteering

    def __init__(self, vectors: Float[Array, "slots L E"], rows: Int[Array, "T"]):
        self._vectors, self._rows = vectors, rows

    def layer(self, index: int, x: jax.Array) -> _LayerVectors:
        return _LayerVectors(self._vectors[:, index], self._rows)


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
    asked_by = ("patching",)
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
