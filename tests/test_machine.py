"""What may be used of a machine, read from control groups that are written out here as Linux shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jaxllm import machine
from jaxllm.cpu_kernels import library
from jaxllm.errors import ConfigError
from jaxllm.machine import Cores, Memory, cores, memory, return_freed_memory

V2 = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "33 32 0:30 {root} /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n"
    "34 32 0:31 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:6 - cgroup cgroup rw,cpu,cpuacct\n"
)
GIB = 2**30


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def tree(root: Path, group: str, mounts: str, files: Mapping[str, object]) -> Path:
    for name, content in {"proc/self/cgroup": group, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert memory(tmp_path) == Memory(64 * GIB, 48 * GIB)
    assert cores(tmp_path) == Cores(16)


def test_the_smallest_limit_of_all_groups_that_hold_it_counts(tmp_path: Path) -> None:
    pod, inner = "sys/fs/cgroup/pod", "sys/fs/cgroup/pod/container"
    root = tree(
        tmp_path,
        "0::/pod/container",
        V2,
        {
            f"{inner}/memory.max": 8 * GIB, f"{inner}/memory.high": "max", f"{inner}/memory.current": GIB,
            f"{pod}/memory.max": 4 * GIB, f"{pod}/memory.current": 3 * GIB,
            f"{pod}/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}",
            f"{inner}/cpu.max": "max 100000", f"{pod}/cpu.max": "400000 100000",
        },
    )  # fmt: skip
    assert memory(root) == Memory(4 * GIB, 4 * GIB - 3 * GIB // 2, root / pod / "memory.max")
    assert cores(root) == Cores(4, root / pod / "cpu.max")


def test_a_soft_limit_counts_where_it_is_smaller(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/", V2, {"sys/fs/cgroup/memory.max": 4 * GIB, "sys/fs/cgroup/memory.high": 3 * GIB})
    assert memory(root) == Memory(3 * GIB, 3 * GIB, root / "sys/fs/cgroup/memory.high")


def test_max_and_missing_files_are_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", V2, {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/cpu.max": "max 100000"})
    assert memory(root) == Memory(64 * GIB, 48 * GIB) and cores(root) == Cores(16)


@pytest.mark.parametrize(("quota", "count"), [("150000", 2), ("100000", 1), ("10000", 1), ("1590000", 16)])
def test_a_quota_is_rounded_up(tmp_path: Path, quota: str, count: int) -> None:
    assert cores(tree(tmp_path, "0::/", V2, {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})).usable == count


@pytest.mark.parametrize(("processes", "count"), [(1, 6), (2, 3), (4, 2), (8, 1)])
def test_processes_that_share_a_quota_count_on_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, count: int
) -> None:
    monkeypatch.setattr(machine, "_sharers", 1)
    root = tree(tmp_path, "0::/", V2, {"sys/fs/cgroup/cpu.max": "550000 100000"})
    machine.share_quota(processes)
    assert cores(root) == Cores(count, root / "sys/fs/cgroup/cpu.max")


@pytest.mark.parametrize(
    ("allowed", "quota", "count"),
    [
        (range(16), "max", 8),
        ({0, 8}, "max", 1),
        ({0, 1, 8}, "max", 2),
        ({8, 9, 10}, "max", 3),
        (range(16), "250000", 3),
    ],
)
def test_second_threads_of_a_core_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: Iterable[int], quota: str, count: int
) -> None:
    """As many Intel machines number them: the second threads of all eight cores after the first ones."""
    folder = "sys/devices/system/cpu"
    files = {f"{folder}/cpu{n}/topology/thread_siblings_list": f"{n % 8},{n % 8 + 8}" for n in range(16)}
    root = tree(tmp_path, "0::/", V2, files | {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    assert machine.physical_cores(root) == count


def test_a_number_of_threads_is_used_as_it_is_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(library, "library", lambda: SimpleNamespace(jaxllm_set_threads=told.append))
    monkeypatch.setattr(machine, "_threads", None)
    monkeypatch.setattr(machine, "physical_cores", lambda: 8)
    for count in (None, 16, 3, None):
        machine.use_threads(count)
        library.keep_to_threads()
    assert told == [8, 16, 3, 8]
    with pytest.raises(ConfigError, match=r"^threads is 17 in a process that may use 16 cores; accepted are 1 to 16$"):
        machine.use_threads(17)


@pytest.mark.parametrize(
    ("root", "path"), [("/", "/"), ("/docker/ab", "/docker/ab"), ("/docker/ab", "/elsewhere")], ids=str
)
def test_version_1_with_and_without_a_namespace_of_its_own(tmp_path: Path, root: str, path: str) -> None:
    """A container may see its group's path as the machine names it, though its own folder is the top that it sees."""
    top = tree(
        tmp_path,
        f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/",
        V1.format(root=root),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB, "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\nhierarchical_memory_limit {2**63}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 250000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
    )  # fmt: skip
    assert memory(top) == Memory(2 * GIB, 2 * GIB - GIB // 2, top / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    assert cores(top) == Cores(3, top / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
    }
    root = tree(tmp_path, "4:memory:/\n1:cpu,cpuacct:/", V1.format(root="/"), files)
    assert memory(root) == Memory(64 * GIB, 48 * GIB) and cores(root) == Cores(16)


def test_a_limit_of_a_group_out_of_sight_is_in_the_statistics(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {GIB}"}
    root = tree(tmp_path, "4:memory:/docker/ab", V1.format(root="/docker/ab"), files)
    assert memory(root).total == GIB


@pytest.mark.skipif(sys.platform != "linux", reason="this is of glibc")
def test_freed_memory_is_given_back() -> None:
    blocks = [b"x" * 65_536 for _ in range(1600)]  # each too small to be mapped by itself
    held = psutil.Process().memory_info().rss
    del blocks[:-1]  # the last one keeps the heap from shrinking by itself
    return_freed_memory()
    assert psutil.Process().memory_info().rss < held - 50 * 2**20 and len(blocks) == 1
