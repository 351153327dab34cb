"""Activations that leave a step beside what it is for.

Which of them do is data: each layer is told where in one buffer its own go, and neither computes nor writes those that
nobody wants. So a step is compiled for a number of activations, not for a choice of them, and layers that are alike are
still traced once. A step that records nothing is traced without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.ambient import holding
from jaxllm.requests.captures import TAPPED

Product = Callable[[Float[Array, "T E"] | None], Float[Array, "T E"]]
"""What a block gives, added to a residual stream where there is one."""


class LayerTaps(NamedTuple):
    """What a layer is told: the place in the buffer of its activation at each of TAPPED; one behind the buffer's end
    where nobody wants it."""

    places: Int[Array, "n"]
    buffer: Float[Array, "N T W"]


@dataclass
class Recorder:
    """The activations of one step while it is traced.

    Attributes:
        places: of each layer, and of a last row for what comes after all of them; see `LayerTaps`.
        count: how many activations there is room for.
        width: of the widest of them; others leave the rest of their rows as it is.
    """

    places: Int[Array, "L n"]
    count: int
    width: int
    buffer: Float[Array, "N T W"] | None = None

    @property
    def taken(self) -> Float[Array, "n T W"]:
        """What was recorded."""
        assert self.buffer is not None, "the model records inside recording()"
        return self.buffer

    def layer(self, index: int, x: Float[Array, "T E"]) -> LayerTaps:
        """What the layer `index` is told, whose activations are like `x`."""
        if self.buffer is None:
            self.buffer = jnp.zeros((self.count, len(x), self.width), x.dtype)
        return LayerTaps(self.places[index], self.buffer)

    def last(self, hidden: Float[Array, "T E"]) -> None:
        """The states after the last norm."""
        taps = _Layer(self.layer(-1, hidden))
        taps.record(TAPPED[0], lambda: hidden)
        self.buffer = taps.buffer


class _Layer:
    """The taps of one layer while it is traced."""

    def __init__(self, taps: LayerTaps):
        self.places, self.buffer = taps
        self.sum: str | None = None
        """What is being added to the residual stream, where `summing` is open."""

    def record(self, point: str, value: Callable[[], Float[Array, "T _"]]) -> None:
        """Write what `value` computes, where somebody wants it."""
        place = self.places[TAPPED.index(point)]

        def write(buffer: Float[Array, "N T W"]) -> Float[Array, "N T W"]:
            return _written(buffer, place, value())

        self.buffer = lax.cond(place < len(self.buffer), write, lambda buffer: buffer, self.buffer)

    def add(self, point: str, product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """`product(residual)`; where somebody wants the product, it is computed by itself, written and added."""
        place = self.places[TAPPED.index(point)]

        def apart(buffer: Float[Array, "N T W"]) -> tuple[Float[Array, "T E"], Float[Array, "N T W"]]:
            out = product(None)
            return residual + out, _written(buffer, place, out)

        def at_once(buffer: Float[Array, "N T W"]) -> tuple[Float[Array, "T E"], Float[Array, "N T W"]]:
            return product(residual), buffer

        x, self.buffer = lax.cond(place < len(self.buffer), apart, at_once, self.buffer)
        return x


def _written(buffer: Float[Array, "N T W"], place: Int[Array, ""], value: Float[Array, "T _"]) -> Float[Array, "N T W"]:
    return lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), (place, 0, 0))


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_layer: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def recording(recorder: Recorder | None) -> AbstractContextManager[Recorder | None]:
    """While this is open, a model that is traced records its activations; with None it does not."""
    return holding(_recorder, recorder)


def recorder() -> Recorder | None:
    """Where the activations of the step that is traced go; None where it records none."""
    return _recorder.get()


def tapping(taps: LayerTaps | None) -> AbstractContextManager[_Layer | None]:
    """While this is open, `tap` records; its target has the buffer as it is then. With None nothing is recorded."""
    return holding(_layer, None if taps is None else _Layer(taps))


def tapped() -> bool:
    """Whether the layer that is traced records: it then leaves no sum to the next."""
    return _layer.get() is not None


def tap(point: str, value: jax.Array | Callable[[], jax.Array]) -> None:
    """Record an activation of the layer that is traced, at one of TAPPED, where it records any.

    What a function gives is computed where somebody wants it.
    """
    target = _layer.get()
    if target is not None:
        target.record(point, value if callable(value) else lambda: value)


def summed(point: str, product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """`product(residual)`. What the block adds is recorded at `point` of the layer that is traced, where it records."""
    target = _layer.get()
    return product(residual) if target is None else target.add(point, product, residual)


@contextmanager
def summing(point: str | None) -> Iterator[None]:
    """While this is open, the product that `add_product` adds to the residual stream is recorded at `point`, if any."""
    target = _layer.get()
    if target is not None:
        target.sum = point
    yield
    if target is not None:
        target.sum = None


def add_product(product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """`product(residual)`, the last of a block, recorded where `summing` says how it is known."""
    target = _layer.get()
    point = None if target is None else target.sum
    return product(residual) if point is None else summed(point, product, residual)
