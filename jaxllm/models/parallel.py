"""Which degrees of tensor and expert parallelism divide a model, and which of its layers run together in stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxllm.errors import ConfigError
from jaxllm.models.caches import CacheSpec, Shared
from jaxllm.models.config import DecoderConfig
from jaxllm.models.options import Stage


class Divided(NamedTuple):
    """Something that is shared out among devices; what is `replicable` may also be on several of them."""

    label: str
    size: int
    replicable: bool = False

    def fits(self, degree: int) -> bool:
        """Whether `degree` devices can share it."""
        return self.size % degree == 0 or (self.replicable and degree % self.size == 0)


def allowed_degrees(config: DecoderConfig, expert_parallel: bool = False, most: int = 64) -> list[int]:
    """The degrees up to `most` at which every head and every MLP row, or expert, has a device of its own."""
    return [degree for degree in range(1, most + 1) if all(d.fits(degree) for d in _divided(config, expert_parallel))]


def check_parallel(config: DecoderConfig, tp: int, expert_parallel: bool = False, dp: int = 1) -> None:
    """Raises ConfigError naming the allowed degrees when `tp` does not divide the model.

    With `expert_parallel` the devices of `dp` batches share the experts.
    """
    if expert_parallel and config.moe is None:
        raise ConfigError("enable_expert_parallel is true, but this model has no experts; accepted is false")
    allowed = allowed_degrees(config, expert_parallel, max(tp, 64))
    if tp not in allowed:
        sizes = ", ".join(d.label for d in _divided(config, expert_parallel))
        raise ConfigError(
            f"tensor_parallel_size is {tp}, which does not divide this model ({sizes}); accepted are "
            f"{', '.join(map(str, allowed))}"
        )
    if expert_parallel and config.moe is not None and config.moe.num_experts % (tp * dp):
        raise ConfigError(
            f"data_parallel_size is {dp} and tensor_parallel_size is {tp}, with enable_dp_attention and "
            f"enable_expert_parallel: {config.moe.num_experts} experts are not shared equally by {tp * dp} devices"
        )


def _divided(config: DecoderConfig, expert_parallel: bool) -> list[Divided]:
    found = [Divided(f"{config.num_heads} heads", config.num_heads)] if config.attends else []
    if config.conv:
        found.append(Divided(f"{config.hidden_size} channels", config.hidden_size))
    if config.delta:
        found.append(Divided(f"{config.delta.key_heads} key heads of linear attention", config.delta.key_heads))
    if ssd := config.ssd:
        found.append(Divided(f"{ssd.heads} state-space heads", ssd.heads))
        found.append(Divided(f"{ssd.groups} state-space groups", ssd.groups, replicable=True))
    if config.attends and not config.mla:
        counts = dict.fromkeys(config.num_kv_heads_of(layer) for layer in config.layers if layer.attends)
        found += [Divided(f"{count} KV heads", count, replicable=True) for count in counts]
    beside_experts = config.moe is not None and config.moe.beside_dense
    dense = [layer for layer in config.layers if layer.dense or beside_experts]
    found += [Divided(f"MLP size {size}", size) for size in dict.fromkeys(map(config.intermediate_size_of, dense))]
    if moe := config.moe:
        found.append(
            Divided(f"{moe.num_experts} experts", moe.num_experts)
            if expert_parallel
            else Divided(f"expert size {moe.hidden}", moe.hidden)
        )
        if moe.shared_hidden:
            found.append(Divided(f"shared expert size {moe.shared_hidden}", moe.shared_hidden))
    return found


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
