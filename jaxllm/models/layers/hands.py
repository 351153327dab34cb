"""Hands in a model while it is traced: recording, steering, patching, adapters.

A model knows that there may be hands in it, and not whose. A `Hand` sees the whole stack of layers, a `LayerHand` one
of them. Layers are jitted and traced once for all that are alike, so a hand tells a layer things as data. A step
without hands is traced without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import Late, StepMetadata

Product = Callable[[Float[Array, "T E"] | None], Float[Array, "T E"]]
"""A block's output, added to a residual stream where there is one."""


class LayerHand:
    """A hand in one layer. Each method has a default that does nothing."""

    whole = False  # it needs the layer's whole output: a layer that leaves a sum to the next one runs as the plain one

    def __init__(self, data: Any):
        """`data` is what `Hand.layer` gave."""
        self.data = data

    def tap(self, point: str, value: Callable[[], jax.Array]) -> None:
        """The layer has an activation, which `value` computes."""

    def add(self, point: str, product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """`product(residual)`, of which the product by itself is the activation `point`."""
        return product(residual)

    def end(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The residual stream [T, E] as it leaves the layer."""
        return x


class Hand:
    """A hand in the stack of layers."""

    layers: type[LayerHand] | None = None  # its hands in single layers, if it has any

    def begin(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The embeddings of the step's tokens."""
        return x

    def layer(self, index: int, x: Float[Array, "T E"]) -> Any:
        """A pytree that the hand in the layer `index` is made of; `x` is the residual stream that it takes."""

    def took(self, index: int, data: Any) -> None:
        """The layer has run, and these are the `data` of the hand in it now."""

    def before(self, index: int, x: Float[Array, "T E"], late: Late | None) -> None:
        """The layer `index` takes `x`, with what is yet to be added to it."""

    def last(self, hidden: Float[Array, "T E"]) -> None:
        """The hidden states after the last norm."""


@dataclass
class Told:
    """Context of the layer that is traced, which is not handed from call to call."""

    meta: StepMetadata
    hands: Sequence[LayerHand] = ()
    places: Any = None  # of its experts in host memory, if it has any; it leaves them changed
    sum: str | None = None  # the activation that the next product is, while `summing` is open


_told: ContextVar[Told | None] = ContextVar("told", default=None)


@contextmanager
def telling(told: Told) -> Iterator[Told]:
    """While this is open, what is traced is told this."""
    token = _told.set(told)
    try:
        yield told
    finally:
        _told.reset(token)


def told() -> Told:
    """The context of the layer that is traced now."""
    found = _told.get()
    assert found is not None, "a layer is traced inside telling()"
    return found


def tap(point: str, value: jax.Array | Callable[[], jax.Array]) -> None:
    """Show the hands an activation of the layer that is traced; a function is called where one wants it."""
    found = _told.get()
    for hand in found.hands if found is not None else ():
        hand.tap(point, value if callable(value) else lambda: value)


def summed(point: str, product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """`product(residual)`; what the product adds is the activation `point`."""

    def through(hand: LayerHand, inner: Product) -> Product:
        return lambda residual: inner(None) if residual is None else hand.add(point, inner, residual)

    found = _told.get()
    for hand in found.hands if found is not None else ():
        product = through(hand, product)
    return product(residual)


@contextmanager
def summing(point: str | None) -> Iterator[None]:
    """While this is open, the product that `add_product` adds to the residual stream is the activation `point`."""
    found = _told.get()
    if found is not None:
        found.sum = point
    yield
    if found is not None:
        found.sum = None


def add_product(product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """`product(residual)`, the last of a block, which `summing` says the name of."""
    found = _told.get()
    point = None if found is None else found.sum
    return product(residual) if point is None else summed(point, product, residual)
