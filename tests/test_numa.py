"""An engine keeps to one NUMA node: its cores, and its memory first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, machine
from jaxllm.config import ModelConfig, make_config
from jaxllm.engine.doors import engine_process
from jaxllm.engine.doors.share import Share
from jaxllm.errors import ConfigError
from jaxllm.sharding import nvidia

HERE = machine.nodes()
needs_nodes = pytest.mark.skipif(not HERE, reason="this system tells of no NUMA nodes")


def nodes_of(folder: Path, *lists: str) -> Path:
    """Files as Linux has them, a node for each list of cores."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def test_nodes_have_the_cores_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 9, 10})
    assert machine.nodes(nodes_of(tmp_path, "0-3", "4-7", "", "8-10,15")) == {0: [0, 1, 2, 3], 3: [9, 10]}
    assert machine.nodes(tmp_path / "nowhere") == {}


def test_engines_take_the_nodes_in_turn() -> None:
    known = {0: [0, 1], 2: [4, 5]}
    assert [machine.choose_node("auto", number, known) for number in range(5)] == [0, 2, 0, 2, 0]
    assert machine.choose_node(2, 1, known) == 2
    with pytest.raises(ConfigError, match="numa_node is 1; accepted are auto and 0, 2"):
        machine.choose_node(1, 0, known)
    with pytest.raises(ConfigError, match="tells of no NUMA nodes"):
        machine.choose_node("auto", 0, {})


@pytest.mark.parametrize(
    ("asked", "number", "count", "node", "share"),
    [
        ("auto", 0, 2, 0, None),
        ("auto", 1, 2, 1, None),
        ("auto", 2, 3, 0, (1, 2)),
        ("auto", 1, 3, 1, None),
        (1, 2, 3, 1, (2, 3)),
        ("auto", None, 1, 0, None),
    ],
)
def test_engines_on_one_node_share_it(
    monkeypatch: pytest.MonkeyPatch, asked: int | str, number: int | None, count: int, node: int, share: Any
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(machine, "nodes", lambda: {0: [0, 1], 1: [2, 3]})
    monkeypatch.setattr(machine, "keep_to_node", lambda node, known: taken.append(node))
    found = engine_process.take_node(asked, None if number is None else Share(number, count))
    assert taken == [node]
    assert (None if found is None else (found.number, found.count)) == share


def test_it_is_for_engines_on_a_cpu_with_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "used_cards", lambda: [nvidia.Card("H100", 1, 1)])
    with pytest.raises(ConfigError, match="this engine runs on GPUs"):
        engine_process.take_node("auto", None)
    for fields in ({"engine_process": False}, {"multi_process": True, "tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="numa_node is auto"):
            make_config(ModelConfig, numa_node="auto", **fields)
    with pytest.raises(ConfigError, match="numa_node"):
        make_config(ModelConfig, numa_node="all")
    with pytest.raises(ConfigError, match="set engine_process to true"):
        LLM(numa_node=0)


@needs_nodes
def test_a_process_keeps_to_a_node() -> None:
    """As Linux says of it, and of threads that it starts later."""
    node, cores = next(iter(HERE.items()))
    program = (
        "import threading\n"
        "from pathlib import Path\n"
        "from jaxllm import machine\n"
        f"machine.keep_to_node({node}, machine.nodes())\n"
        "def show():\n"
        "    task = Path(f'/proc/self/task/{threading.get_native_id()}')\n"
        "    print([l.split()[1] for l in (task / 'status').read_text().splitlines() if 'Cpus_allowed_list' in l][0])\n"
        "    print(sorted({l.split()[1] for l in Path('/proc/self/numa_maps').read_text().splitlines()}))\n"
        "show()\n"
        "thread = threading.Thread(target=show)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    allowed, policies, of_thread, _ = done.stdout.splitlines()
    assert allowed == of_thread and set(machine._numbers(allowed)) == set(cores)
    assert f"prefer:{node}" in policies or f"prefer={node}" in policies
