"""What is yet to be added up, so that the kernel that reads it next takes the sum on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unsummed:
    """A product by parts of its inputs: the sum of the parts is the product.

    Attributes:
        parts: float32.
    """

    parts: Float[Array, "P T E"]

    def summed(self) -> Float[Array, "T E"]:
        """In float32."""
        return jnp.sum(self.parts, axis=0)


class Later:
    """What is given in place of a residual by one who will add it, and takes what is yet to be summed."""


LATER = Later()

Late: TypeAlias = Any
"""What is yet to be added to the residual stream: `[T, E]`, or for one who adds later `Unsummed` or a `Mixture`."""
Residual = Float[Array, "T E"] | Later | None
"""The residual stream, to which a block adds what it gives, or none, or one that is added to later."""


def late_sum(late: Late) -> Float[Array, "T E"]:
    """What is yet to be added, as one array."""
    found: jax.Array = late if isinstance(late, jax.Array) else late.summed()
    return found


def with_late(x: Float[Array, "T E"], late: Late | None) -> Float[Array, "T E"]:
    """The residual stream with what is yet to be added to it, if there is anything."""
    return x if late is None else (x + late_sum(late)).astype(x.dtype)
