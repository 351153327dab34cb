"""How a model is built, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxllm.pallas_kernels import REFERENCE, Kernels


@dataclass(frozen=True)
class AdapterSizes:
    """How many adapters are on the devices at once, and the greatest rank that one may have."""

    places: int
    rank: int


@dataclass(frozen=True)
class BuildOptions:
    """What every layer is told when it is made.

    Attributes:
        dtype: of activations and dense weights.
        tp: the degree of tensor parallelism.
        kernels: what runs the products and attention.
        expert_parallel: each device has whole experts, not a part of each.
        adapters: products add what adapters give, of which the model has tables; without, it knows of none.
    """

    dtype: Any = jnp.bfloat16
    tp: int = 1
    kernels: Kernels = REFERENCE
    expert_parallel: bool = False
    adapters: AdapterSizes | None = None
