"""The memory that an engine will take, found before it touches a device: another engine may still run there."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxllm import compat, machine
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.offload import check_host_memory
from jaxllm.engine.start.plan import PROCESS_BYTES
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.sharding import nvidia
from jaxllm.sharding.devices import expected_platform
from jaxllm.weights.checkpoint import Checkpoint

SHARE_STEP = 0.001
"""A share of a GPU's memory is rounded up to this."""


class Foreseen(NamedTuple):
    """A config that an engine is then built from, and the bytes that it takes of each device, or of the host.

    The bytes are None where only the devices themselves could tell.
    """

    config: EngineConfig
    nbytes: int | None


def foresee(config: EngineConfig, checkpoint: Checkpoint, budget: int | None) -> Foreseen:
    """Plan an engine that takes at most `budget` bytes, if there is one; its sizes stay what they are here then.

    Raises:
        ConfigError: it can never fit, or cannot be planned within a budget on devices of this kind.
        CheckpointError: as `make_blueprint`.
    """
    platform = expected()
    if platform is None:
        if budget is not None:
            raise ConfigError(
                f"model_memory is {format_bytes(budget)}: it is for CPUs and NVIDIA GPUs, whose memory can be planned "
                "with while another model holds them; limit models by max_loaded_models"
            )
        return Foreseen(config, None)
    spare = PROCESS_BYTES if platform.memory is None else int(platform.memory * compat.SPARE_SHARE)
    if budget is None:
        plan = make_blueprint(config, checkpoint, platform).plan
        check_host_memory(plan, platform)
        return Foreseen(config, spare + plan.planned_bytes)
    try:
        plan = make_blueprint(config, checkpoint, within(platform, budget - spare)).plan
    except ConfigError as error:
        raise ConfigError(f"{error}; model_memory is {format_bytes(budget)}") from None
    check_host_memory(plan, platform)
    needed = spare + plan.planned_bytes
    if needed > budget:
        raise ConfigError(
            f"{config.model} needs {format_bytes(needed)} of memory: {format_bytes(plan.weight_bytes)} of weights, "
            f"{format_bytes(plan.kv_bytes)} of KV cache, {format_bytes(plan.workspace_bytes)} to compute in and "
            f"{format_bytes(spare)} besides; model_memory is {format_bytes(budget)}: raise it, or lower the model's "
            "kv_cache_memory, max_model_len or max_num_seqs, or quantize its weights (isq)"
        )
    sizes: dict[str, object] = {"kv_cache_memory": plan.kv_bytes, "state_cache_memory": plan.state_cache_bytes}
    if platform.memory is not None:
        share = math.ceil(plan.planned_bytes / platform.memory / SHARE_STEP) * SHARE_STEP
        sizes["gpu_memory_utilization"] = min(share, 1.0)
    return Foreseen(config.model_copy(update=sizes), needed)


def expected() -> Platform | None:
    """The platform that an engine is going to find; on the host all memory counts as free, as it may be by then."""
    name, host = expected_platform(), machine.memory()
    if name == "cpu":
        return Platform("cpu", 1, None, host.total, host_memory=host.total)
    cards = nvidia.cards() if name == "gpu" else []
    if not cards:
        return None
    card = cards[0]
    return Platform("gpu", len(cards), card.total, host.total, card.total, card.name, host.total)


def within(platform: Platform, nbytes: int) -> Platform:
    """A platform of which an engine gets `nbytes`."""
    if platform.memory_limit is None:
        return dataclasses.replace(platform, free_host_memory=min(platform.free_host_memory, nbytes))
    return dataclasses.replace(platform, memory_limit=min(platform.memory_limit, nbytes))
