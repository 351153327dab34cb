"""What a mixture of experts gives before it is summed, so that the sum may be taken where the next one is."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixture:
    """Outputs of each token's experts, and what every token gets beside them.

    Attributes:
        weights: of a token's experts, float32. Where one is zero the output counts as zero, whatever it holds.
        outputs: float32.
        shared: what is added to the weighted sum.
    """

    weights: Float[Array, "T k"]
    outputs: Float[Array, "T k E"]
    shared: Float[Array, "T E"] | None = None

    def summed(self) -> Float[Array, "T E"]:
        """In float32."""
        weights = self.weights[:, :, None]
        out = jnp.where(weights == 0, 0, weights * self.outputs).sum(axis=1)
        return out if self.shared is None else out + self.shared
