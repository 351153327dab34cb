"""States between a model's layers, which something beside the model reads in the same step.

A step that gathers none is traced without any of this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.models.layers.ambient import holding
from jaxllm.pallas_kernels import Late, with_late


@dataclass
class Gathering:
    """The residual stream in front of each of `layers`, in ascending order, while one step is traced."""

    layers: tuple[int, ...]
    found: list[Float[Array, "T E"]] = field(default_factory=list)

    def pass_by(self, index: int, x: Float[Array, "T E"], late: Late | None) -> None:
        """Keep what the layer `index` is given, if it is one of these: the stream, and what is yet to be added."""
        if index in self.layers:
            self.found.append(with_late(x, late))

    @property
    def joined(self) -> Float[Array, "T n"]:
        """All of them side by side."""
        assert len(self.found) == len(self.layers), "the model has passed all of these layers"
        return jnp.concatenate(self.found, axis=-1)


_gathering: ContextVar[Gathering | None] = ContextVar("gathering", default=None)


def gathering(layers: tuple[int, ...]) -> AbstractContextManager[Gathering | None]:
    """While this is open, a model that is traced keeps its states in front of `layers`; with none it keeps nothing."""
    return holding(_gathering, Gathering(layers) if layers else None)


def step_gathering() -> Gathering | None:
    """Where the states of the step that is traced go; None where it keeps none."""
    return _gathering.get()
