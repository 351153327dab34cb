"""A weight as kernels read it whose inputs were sorted before they were quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.sharding.collectives import gather_over_tensor


@dataclass(frozen=True)
class OrderedMatrix:
    """A matrix `[o, i]`, or a stack of them, whose columns do not lie as inputs do.

    Attributes:
        matrix: what is read: a `KernelMatrix` or another that kernels know.
        order: int32 `[*stack, i]`: column `j` is for input `order[j]`.
        divided: whether the columns are for inputs of all devices.
    """

    matrix: Any
    order: jax.Array
    divided: bool = False

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype

    @property
    def scale(self) -> Any:
        return self.matrix.scale

    def arranged(self, x: jax.Array) -> jax.Array:
        """The inputs `[n, i]` of this one matrix as its columns lie."""
        return arranged(x, self.order, self.divided)


def arranged(x: jax.Array, order: jax.Array, divided: bool = False) -> jax.Array:
    """The inputs `order` of `x` `[n, i]`, which is `divided` over the devices or whole on each."""
    x = gather_over_tensor(x) if divided else x
    return x.at[:, order].get(mode="promise_in_bounds", unique_indices=True)
