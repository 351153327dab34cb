"""What is added to the residual stream between layers, for some tokens of a request.

Each slot has a vector for each layer, and the tokens that they are for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Feature, Surroundings, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import SETTING_INTS
from jaxllm.engine.core.request import Request
from jaxllm.engine.messages import EngineRequest
from jaxllm.models.layers.hands import Hand, LayerHand
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.steering import Steering


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

    def attach(self, around: Surroundings) -> None:
        self._around = around

    def prepare(self, request: Request, asked: EngineRequest) -> Steering | None:
        return asked.steering

    def needs(self, request: Request, extra: Steering) -> Iterable[Key]:
        return [Key("put", 0, frozenset({self.name}))]

    def salt(self, extra: Steering) -> str:
        return extra.digest

    def seat(self, request: Request, extra: Steering) -> None:
        sizes, device = self._around.sizes, self._around.device
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
