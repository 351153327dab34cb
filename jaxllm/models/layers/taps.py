"""Activations that leave a step beside what it is for.

Which of them do is data: each layer is told where in one buffer its own go, and neither computes nor writes those that
nobody wants. So a step is compiled for a number of activations, not for a choice of them, and layers that are alike are
still traced once. A step that records nothing is traced without any of this, and one of which nobody wants what a layer
adds to the residual stream adds it at once, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.requests.captures import TAPPED, UNPARTED

_UNPARTED = np.array([TAPPED.index(name) for name in UNPARTED])


class LayerTaps(NamedTuple):
    """What a layer is told: the place in the buffer of its activation at each of TAPPED, or of UNPARTED; one behind the
    buffer's end where nobody wants it."""

    places: Int[Array, "n"]
    buffer: Float[Array, "N T W"]


@dataclass
class Recorder:
    """The activations of one step while it is traced.

    Attributes:
        places: of each layer, and of a last row for what comes after all of them; see `LayerTaps`.
        count: how many activations there is room for.
        parted: whether layers record at all of TAPPED, or at UNPARTED alone.
        width: of the widest of them; others leave the rest of their rows as it is.
    """

    places: Int[Array, "L n"]
    count: int
    width: int
    parted: bool = True
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
        places = self.places[index]
        return LayerTaps(places if self.parted else places[_UNPARTED], self.buffer)

    def last(self, hidden: Float[Array, "T E"]) -> None:
        """The states after the last norm."""
        taps = _Layer(self.layer(-1, hidden))
        taps.record(UNPARTED[0], lambda: hidden)
        self.buffer = taps.buffer


class _Layer:
    """The taps of one layer while it is traced."""

    def __init__(self, taps: LayerTaps):
        self.places, self.buffer = taps
        self.points = TAPPED if len(self.places) == len(TAPPED) else UNPARTED

    def record(self, point: str, value: Callable[[], Float[Array, "T _"]]) -> None:
        """Write what `value` computes, where somebody wants it."""

        def write(buffer: Float[Array, "N T W"]) -> Float[Array, "N T W"]:
            return lax.dynamic_update_slice(buffer, value()[None].astype(buffer.dtype), (place, 0, 0))

        if point in self.points:
            place = self.places[self.points.index(point)]
            self.buffer = lax.cond(place < len(self.buffer), write, lambda buffer: buffer, self.buffer)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_layer: ContextVar[_Layer | None] = ContextVar("layer", default=None)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[Recorder | None]:
    """While this is open, a model that is traced records its activations; with None it does not."""
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def recorder() -> Recorder | None:
    """Where the activations of the step that is traced go; None where it records none."""
    return _recorder.get()


@contextmanager
def tapping(taps: LayerTaps | None) -> Iterator[_Layer | None]:
    """While this is open, `tap` records; its target has the buffer as it is then. With None nothing is recorded."""
    target = None if taps is None else _Layer(taps)
    token = _layer.set(target)
    try:
        yield target
    finally:
        _layer.reset(token)


def tapped() -> bool:
    """Whether the layer that is traced records: it then leaves no sum to the next."""
    return _layer.get() is not None


def tapped_apart() -> bool:
    """Whether it records what is added to the residual stream, and adds in two steps what it usually adds at once."""
    target = _layer.get()
    return target is not None and target.points is TAPPED


def tap(point: str, value: jax.Array | Callable[[], jax.Array]) -> None:
    """Record an activation of the layer that is traced, at one of TAPPED, where it records any.

    What a function gives is computed where somebody wants it.
    """
    target = _layer.get()
    if target is not None:
        target.record(point, value if callable(value) else lambda: value)
