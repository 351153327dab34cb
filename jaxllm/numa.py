"""NUMA nodes: which cores and which memory are near each other, and a process that keeps to one of them."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from jaxllm.errors import ConfigError

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
    """The node of process `number`; with "auto" the processes take the nodes in turn.

    Raises:
        ConfigError: there is no such node.
    """
    if not known:
        raise ConfigError(f"numa_node is {asked}, and this machine tells of no NUMA nodes; leave it out")
    if asked == "auto":
        return list(known)[number % len(known)]
    if asked not in known:
        raise ConfigError(f"numa_node is {asked}; accepted are auto and {', '.join(map(str, known))}")
    return int(asked)


def keep_to_node(node: int, known: dict[int, list[int]]) -> None:
    """Run on the cores of a node from now on, with memory of that node as long as it has any. Before threads start.

    Raises:
        ConfigError: the system does not allow it.
    """
    try:
        os.sched_setaffinity(0, known[node])
        _prefer_memory(node)
    except OSError as error:
        raise ConfigError(f"numa_node is {node}, and the system does not allow it: {error.strerror}") from None


def _prefer_memory(node: int) -> None:
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        raise OSError(0, f"jaxllm does not know how to say so on {platform.machine()}")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    c_library = ctypes.CDLL(None, use_errno=True)
    if c_library.syscall(call, _MPOL_PREFERRED, mask, 64 * len(mask) + 1):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _numbers(text: str) -> list[int]:
    """'0-2,8' -> [0, 1, 2, 8]"""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
