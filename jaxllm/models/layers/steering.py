"""What is added to the residual stream between layers, for some tokens of a step.

Each slot has a vector for each layer, and the tokens that they are for. A step that steers nobody is traced without any
of this.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.ambient import holding
from jaxllm.pallas_kernels import StepMetadata


class SteeringState(NamedTuple):
    """What lives on the devices between steps; the last row belongs to nobody, and is zero."""

    vectors: Float[Array, "slots L E"]
    ranges: Int[Array, "slots 2"]
    """The first position that is steered, and the first behind it that is not."""

    def of(self, meta: StepMetadata) -> StepSteering:
        """What the tokens of a step are steered by."""
        assert meta.slots is not None, "steering is by slot"
        slots = meta.slots[jnp.minimum(meta.seq_ids, len(meta.slots) - 1)]
        first, end = self.ranges[slots].T
        steered = meta.live & (first <= meta.positions) & (meta.positions < end)
        return StepSteering(self.vectors, jnp.where(steered, slots, len(self.ranges) - 1))


class LayerSteering(NamedTuple):
    """One layer's vectors, and each token's row of them."""

    vectors: Float[Array, "slots E"]
    rows: Int[Array, "T"]

    def added(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The residual stream with what steers it."""
        return x + self.vectors[self.rows].astype(x.dtype)


class StepSteering(NamedTuple):
    """All layers' vectors, and each token's row of them."""

    vectors: Float[Array, "slots L E"]
    rows: Int[Array, "T"]

    def layer(self, index: int) -> LayerSteering:
        """What one layer is told."""
        return LayerSteering(self.vectors[:, index], self.rows)


_steering: ContextVar[StepSteering | None] = ContextVar("steering", default=None)


def step_steering() -> StepSteering | None:
    """What the step that is traced is steered by; None where nobody is."""
    return _steering.get()


class Steered:
    """A decoder whose residual stream is steered, while it is traced."""

    def __init__(self, model: Any, state: SteeringState):
        self._model = model
        self._state = state
        self.config, self.kernels = model.config, model.kernels
        self.logits, self.most_likely = model.logits, model.most_likely

    def __call__(self, tokens: Any, caches: Any, meta: StepMetadata) -> Any:
        """See `Decoder`."""
        with holding(_steering, self._state.of(meta)):
            return self._model(tokens, caches, meta)
