"""What this process may use of its machine, under the limits of control groups too: memory, cores, a NUMA node."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from jaxllm.errors import ConfigError

_UNLIMITED = 2**60
"""Version 1 writes a number near 2**63 where there is no limit."""
_ROOT = Path("/")


class Memory(NamedTuple):
    """Bytes that this process may use in all, and those of them that are free."""

    total: int
    available: int
    limit: Path | None = None
    """The file whose limit makes `total` less than what the machine has."""


class Cores(NamedTuple):
    """Logical cores that this process may keep busy."""

    usable: int
    limit: Path | None = None
    """The file whose quota makes `usable` less than the cores that it may run on."""


def memory(root: Path = _ROOT) -> Memory:
    """The machine's memory, or that of the tightest control group. `root` is for tests: where /proc and /sys lie."""
    host = psutil.virtual_memory()
    found = Memory(host.total, host.available)
    for group, version in _groups(root, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        rows = (line.split() for line in _text(group / "memory.stat").splitlines())
        statistics = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
        used = _number(group / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
        prefix = "" if version == 2 else "total_"
        used -= statistics.get(f"{prefix}inactive_file", 0) + statistics.get(f"{prefix}active_file", 0)
        limits = [(_number(group / name), group / name) for name in names]
        limits.append((statistics.get("hierarchical_memory_limit"), group / "memory.stat"))
        for limit, file in limits:
            if limit is None or limit >= _UNLIMITED:
                continue
            free = max(0, min(found.available, limit - max(used, 0)))
            found = Memory(min(limit, found.total), free, file if limit < found.total else found.limit)
    return found


def cores(root: Path = _ROOT) -> Cores:
    """The cores that this process may run on, or its quota of them if less, rounded up; `root` is as in `memory`."""
    allowed, quota = allowed_cores(), _quota(root)
    if quota is None:
        return Cores(allowed)
    usable = max(1, math.ceil(quota[0] / _sharers))
    return Cores(usable, quota[1]) if usable < allowed else Cores(allowed)


def share_quota(processes: int) -> None:
    """From now on this process counts on its part of the quota alone, which it shares with others like it."""
    global _sharers
    _sharers = processes


_sharers = 1


@cache
def _quota(root: Path) -> tuple[float, Path] | None:
    """The smallest quota of cores and its file, read once: the kernels ask for each matrix that is loaded."""
    found: list[tuple[float, Path]] = []
    for group, version in _groups(root, "cpu"):
        if version == 2:
            file = group / "cpu.max"
            quota, _, period = _text(file).partition(" ")
        else:
            file = group / "cpu.cfs_quota_us"
            quota, period = _text(file), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append((int(quota) / int(period), file))
    return min(found, key=lambda one: one[0], default=None)


def limits(root: Path = _ROOT) -> list[str]:
    """For the log: what control groups allow and where they say so, a line for each; `root` is as in `memory`."""
    of_memory, of_cores, lines = memory(root), cores(root), []
    if of_memory.limit is not None:
        sizes = f"{of_memory.total / 2**20:,.0f} MiB of memory, {of_memory.available / 2**20:,.0f} MiB of them free"
        lines.append(f"{of_memory.limit} allows {sizes}")
    if of_cores.limit is not None:
        lines.append(f"{of_cores.limit} allows {of_cores.usable} of {allowed_cores()} cores")
    return lines


def allowed_cores() -> int:
    """The logical cores that this process may run on, however long it may run on them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may keep busy: a second thread of a core gains arithmetic nothing."""
    usable = cores(root).usable
    allowed = len(by_core(os.sched_getaffinity(0), root)) if hasattr(os, "sched_getaffinity") else usable
    return max(1, min(usable, allowed, psutil.cpu_count(logical=False) or usable))


def by_core(numbers: Iterable[int], root: Path = _ROOT) -> list[list[int]]:
    """These logical cores, those of one physical core together; each is one where the system does not say."""
    found: dict[str, list[int]] = {}
    for number in sorted(numbers):
        found.setdefault(_siblings(root, number), []).append(number)
    return list(found.values())


@cache
def _siblings(root: Path, number: int) -> str:
    return _text(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list") or str(number)


def use_threads(count: int | None) -> None:
    """From now on that many threads compute, or None: the default. Raises ConfigError: this process has fewer cores."""
    global _threads
    if count is not None and count > (allowed := allowed_cores()):
        raise ConfigError(f"threads is {count} in a process that may use {allowed} cores; accepted are 1 to {allowed}")
    _threads = count


_threads: int | None = None


def compute_threads() -> int:
    """How many threads compute in this process on a CPU: one a physical core, where no setting says how many."""
    return _threads or physical_cores()


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control group and of those that hold it, innermost first, each with its version."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # 36 35 0:31 /docker/ab /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
        fields, _, kind = line.partition(" - ")
        system, *_, options = kind.split()
        _, _, _, mounted, place, *_ = fields.split()
        if system == "cgroup2" and "" in paths:
            path, version = paths[""], 2
        elif system == "cgroup" and controller in options.split(",") and controller in paths:
            path, version = paths[controller], 1
        else:
            continue
        top = root / place.lstrip("/")
        group = top / Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else top
        yield from ((folder, version) for folder in (group, *group.parents) if folder.is_relative_to(top))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # another system, or a kernel without that controller
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None


def share_one_heap() -> None:
    """Have all threads allocate in one heap, whose free parts all can use; to be called before other threads begin."""
    if (choose := _of_glibc("mallopt")) is not None:
        choose(-8, 1)  # M_ARENA_MAX of malloc.h: how many heaps there may be


def return_freed_memory() -> None:
    """Give what this process has freed back to the system: glibc would keep hundreds of MB of a large tokenizer."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of Linux's call, which the C library has no function for."""
_MPOL_PREFERRED = 1


def nodes(root: Path = _NODES) -> dict[int, list[int]]:
    """Each node that has cores which this process may run on -> those cores. `root` is for tests."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    found = {}
    for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        cores = sorted(allowed & set(_numbers((folder / "cpulist").read_text())))
        if cores:
            found[int(folder.name[4:])] = cores
    return found


def choose_node(asked: int | str, number: int, known: dict[int, list[int]]) -> int:
    """The node of process `number`; with "auto" they take the nodes in turn. Raises ConfigError without such a node."""
    if not known:
        raise ConfigError(f"numa_node is {asked}, and this machine tells of no NUMA nodes; leave it out")
    if asked == "auto":
        return list(known)[number % len(known)]
    if asked not in known:
        raise ConfigError(f"numa_node is {asked}; accepted are auto and {', '.join(map(str, known))}")
    return int(asked)


def keep_to_node(node: int, known: dict[int, list[int]]) -> None:
    """Run on a node's cores, with its memory while there is any; before threads start. Raises ConfigError."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    call = _SET_MEMPOLICY.get(platform.machine())
    try:
        os.sched_setaffinity(0, known[node])
        if call is None:
            raise OSError(0, f"jaxllm does not know how to say so on {platform.machine()}")
        c_library = ctypes.CDLL(None, use_errno=True)
        if c_library.syscall(call, _MPOL_PREFERRED, mask, 64 * len(mask) + 1):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise ConfigError(f"numa_node is {node}, and the system does not allow it: {error.strerror}") from None


def _numbers(text: str) -> list[int]:
    """'0-2,8' -> [0, 1, 2, 8]"""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
