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
class Stage:
    """Layers `begin … end - 1` of a model, which devices of their own run: stage `index` of `count`, from 0 on.

    The first one has the embedding too, and the last one the last norm and the head.
    """

    index: int
    count: int
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """Whether it takes tokens, and not the states that another has come to."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether what it gives is the model's."""
        return self.index == self.count - 1

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.begin, self.end)

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count}, layers {self.begin} to {self.end - 1}"


@dataclass(frozen=True)
class BuildOptions:
    """What every layer is told when it is made.

    Attributes:
        dtype: of activations and dense weights.
        tp: the degree of tensor parallelism.
        kernels: what runs the products and attention.
        expert_parallel: each device has whole experts, not a part of each.
        dp: how many batches run side by side; with `expert_parallel` their devices share the experts.
        adapters: products add what adapters give, of which the model has tables; without, it knows of none.
        stage: the part of the model that is built; None is all of it.
        host_experts: how many of each device's experts are in host memory: the last ones.
    """

    dtype: Any = jnp.bfloat16
    tp: int = 1
    kernels: Kernels = REFERENCE
    expert_parallel: bool = False
    adapters: AdapterSizes | None = None
    stage: Stage | None = None
    dp: int = 1
    host_experts: int = 0
