"""The part of a machine that one of several engines has to itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jaxllm import machine
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.sharding import nvidia


@dataclass(frozen=True)
class Share:
    """Part `number` of `count`, which are numbered from 0."""

    number: int
    count: int

    def take(self, config: EngineConfig) -> None:
        """Keep this process to its part of the GPUs, or without any to its part of the cores; before JAX is imported.

        Raises:
            ConfigError: there are too few of them, or devices of another kind, which one process takes whole.
        """
        chosen = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
        if chosen not in ("", "cpu", "cuda", "gpu"):
            raise ConfigError(
                f"data_parallel_size is {self.count}, and JAX_PLATFORMS is {chosen}: several engines are for NVIDIA's "
                "GPUs and for CPUs"
            )
        cards = nvidia.cards() if chosen != "cpu" and nvidia.installed_cuda() is not None else []
        if cards:
            self._take_gpus(len(cards), config.tensor_parallel_size)
        else:
            self._take_cores()

    def _take_gpus(self, there: int, each: int) -> None:
        if there < self.count * each:
            raise ConfigError(
                f"data_parallel_size is {self.count} with tensor_parallel_size {each}: that takes {self.count * each} "
                f"GPUs, and there are {there}"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))
        mine = visible.split(",")[self.number * each : (self.number + 1) * each]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)

    def _take_cores(self) -> None:
        """Neighbours, which more often share a cache and memory that is near."""
        if not hasattr(os, "sched_setaffinity"):
            return  # the system shares them out
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < self.count:
            raise ConfigError(
                f"data_parallel_size is {self.count}: each engine needs a core of its own, and there are {len(allowed)}"
            )
        first, end = (len(allowed) * at // self.count for at in (self.number, self.number + 1))
        os.sched_setaffinity(0, allowed[first:end])
        machine.share_quota(self.count)
