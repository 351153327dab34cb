"""Which layers of a model run together where stages of it have devices of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from jaxllm.models.caches import CacheSpec, Shared
from jaxllm.models.options import Stage


def places_to_part(caches: Sequence[CacheSpec]) -> list[int]:
    """The layers that a stage may begin with, the first one left out: a layer stays with the one whose cache it reads.

    Worked example: of five layers, of which the last reads what the third keeps, a stage may begin with 1 or 2.
    """
    joined = [(spec.layer, index) for index, spec in enumerate(caches) if isinstance(spec, Shared)]
    return [cut for cut in range(1, len(caches)) if not any(owner < cut <= reader for owner, reader in joined)]


def share_layers(costs: Sequence[int], head: int, cuts: Sequence[int], count: int) -> tuple[Stage, ...]:
    """`count` stages of which the dearest is as cheap as can be.

    Args:
        costs: of each layer, in any unit.
        head: what the last stage has to do besides.
        cuts: as `places_to_part` gives them; at least `count - 1`.

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
