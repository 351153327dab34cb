"""Options with which a model of any family is built, and the stages in which its layers run together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp

from jaxllm.models.caches import CacheSpec, Shared
from jaxllm.pallas_kernels import REFERENCE, Kernels


@dataclass(frozen=True)
class AdapterSizes:
    """The number of adapters that are on the devices at once, and the greatest rank that one may have."""

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
        """The stage takes tokens, and not the output of another."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """The stage's output is the model's."""
        return self.index == self.count - 1

    @property
    def layers(self) -> range:
        return range(self.begin, self.end)

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count}, layers {self.begin} to {self.end - 1}"


@dataclass(frozen=True)
class BuildOptions:
    """Options of every layer.

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


def places_to_part(caches: Sequence[CacheSpec]) -> list[int]:
    """The layers that a stage may begin with, the first one left out: a layer stays with the one whose cache it reads.

    Worked example: of five layers, of which the last reads what the third keeps, a stage may begin with 1 or 2.
    """
    joined = [(spec.layer, index) for index, spec in enumerate(caches) if isinstance(spec, Shared)]
    return [cut for cut in range(1, len(caches)) if not any(owner < cut <= reader for owner, reader in joined)]


def share_layers(costs: Sequence[int], head: int, cuts: Sequence[int], count: int) -> tuple[Stage, ...]:
    """`count` stages of which the dearest is as cheap as can be.

    `costs` are those of the layers, and `head` what the last stage has to do besides. `cuts` are of `places_to_part`.

    Worked example: six layers of 1 each and a head of 2, in two stages, are parted into 4 and 2 layers.
    """
    ends = [*cuts, len(costs)]
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # least[end] is the dearest stage of the best way to have `made` stages that end there, and where its last begins.
    least: dict[int, float] = {end: before[end] for end in ends}
    begins: list[dict[int, int]] = []
    for made in range(2, count + 1):
        found: dict[int, float] = {}
        begin_of: dict[int, int] = {}
        for end in ends:
            own = head if made == count else 0
            choices = [
                (max(least[begin], before[end] - before[begin] + own), begin) for begin in ends if begin in least
            ]
            found[end], begin_of[end] = min(
                ((cost, begin) for cost, begin in choices if begin < end), default=(math.inf, 0)
            )
        least, begins = {end: cost for end, cost in found.items() if cost < math.inf}, [*begins, begin_of]
    bounds = [len(costs)]
    for begin_of in reversed(begins):
        bounds.insert(0, begin_of[bounds[0]])
    bounds.insert(0, 0)
    return tuple(Stage(index, count, begin, end) for index, (begin, end) in enumerate(pairwise(bounds)))
