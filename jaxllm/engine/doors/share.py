"""One process's part of a machine: its devices or cores, and the memory where it leaves weights for the next one."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import weakref
from dataclasses import dataclass

from jaxllm import machine
from jaxllm.errors import ConfigError
from jaxllm.sharding import nvidia


@dataclass(frozen=True)
class Share:
    """Part `number` of `count`, which are numbered from 0; `setting` is the setting that asks for `count`."""

    number: int
    count: int
    setting: str = "data_parallel_size"

    def take(self, each: int) -> None:
        """Keep this process to its part of the GPUs, or without any to its part of the cores; before JAX is imported.

        Args:
            each: GPUs that a part has.

        Raises:
            ConfigError: there are too few of them, or devices of another kind, which one process takes whole.
        """
        chosen = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
        if chosen not in ("", "cpu", "cuda", "gpu"):
            raise ConfigError(
                f"{self.setting} is {self.count}, and JAX_PLATFORMS is {chosen}: processes that share a machine are "
                "for NVIDIA's GPUs and for CPUs"
            )
        if cards := nvidia.used_cards():
            self._take_gpus(len(cards), each)
        else:
            self._take_cores()

    def _take_gpus(self, there: int, each: int) -> None:
        if there < self.count * each:
            raise ConfigError(
                f"{self.setting} is {self.count}, and each process has {each} of the GPUs: there are {there}, and it "
                f"takes {self.count * each}"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))
        mine = visible.split(",")[self.number * each : (self.number + 1) * each]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)

    def _take_cores(self) -> None:
        """Neighbours, which more often share a cache and memory that is near."""
        if not hasattr(os, "sched_setaffinity"):
            return  # the system shares them out
        cores = machine.by_core(os.sched_getaffinity(0))
        if len(cores) < self.count:
            cores = [[thread] for core in cores for thread in core]
        if len(cores) < self.count:
            raise ConfigError(
                f"{self.setting} is {self.count}: each process needs a core of its own, and there are {len(cores)}"
            )
        first, end = (len(cores) * at // self.count for at in (self.number, self.number + 1))
        os.sched_setaffinity(0, sorted(itertools.chain.from_iterable(cores[first:end])))
        machine.share_quota(self.count)

    def threads(self, together: int | None) -> int | None:
        """This part of the threads that all parts have together."""
        if together is None:
            return None
        first, end = (together * at // self.count for at in (self.number, self.number + 1))
        return end - first


class Keeper:
    """A file without a name, which engine processes inherit: in memory under Linux, on the disk elsewhere.

    It is closed when it is forgotten.
    """

    def __init__(self) -> None:
        self.fd = _open()
        self._closed = weakref.finalize(self, os.close, self.fd)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept there now."""
        return os.fstat(self.fd).st_size

    def clear(self) -> None:
        """Keep nothing."""
        os.ftruncate(self.fd, 0)


def _open() -> int:
    if sys.platform == "linux":
        return os.memfd_create("jaxllm-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
