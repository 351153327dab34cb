"""Real control groups, where this machine lets us make them: what a process in one takes its limits to be."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jaxllm import machine
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

LIMIT = 3 * 2**29
"""Bytes: 1.5 GiB."""
PROGRAM = """
import json
from jaxllm import machine
from tests.reference.tiny import write_checkpoint
memory, cores = machine.memory(), machine.cores()
print(json.dumps([memory.total, memory.available, cores.usable, machine.limits()]))
"""
ENGINE = """
import logging, sys
from jaxllm import LLM
from jaxllm.errors import ConfigError
logging.basicConfig(level="INFO", stream=sys.stdout)
try:
    LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", kv_cache_memory="2GiB", max_num_seqs=4096)
except ConfigError as error:
    print(error)
"""
NAMES = {
    1: {"memory": {"memory.limit_in_bytes": LIMIT}, "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 50_000}},
    2: {"memory": {"memory.max": LIMIT}, "cpu": {"cpu.max": "50000 100000"}},
}
"""Version and controller -> the files that set a limit: half a core, and LIMIT bytes."""


@contextlib.contextmanager
def group(controller: str) -> Iterator[tuple[Path, Path]]:
    """A group of our own with a limit, and one inside of it without, where a process can be put."""
    folder, version = next(machine._groups(Path("/"), controller), (None, 0))
    if folder is None:
        pytest.skip(f"no control group of {controller} is mounted")
    limited = folder / f"jaxllm-{uuid.uuid4().hex}"
    inner = limited / "inner"
    try:
        limited.mkdir()
        for name, value in NAMES[version][controller].items():
            (limited / name).write_text(str(value))
        if version == 2:
            (limited / "cgroup.subtree_control").write_text(f"+{controller}")
        inner.mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            limited.rmdir()
        pytest.skip(f"no control group with a limit of {controller} can be made here: {error}")
    try:
        yield limited, inner
    finally:
        inner.rmdir()
        limited.rmdir()


def said_in(*groups: Path, command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """What a program prints that runs in these groups."""
    entering = "".join(f"echo $$ > {one}/cgroup.procs; " for one in groups)
    result = subprocess.run(
        ["sh", "-ec", f'{entering} exec "$@"', "sh", *command],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | (environment or {}),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_memory_of_a_group_around_ours_counts() -> None:
    with group("memory") as (limited, inner):
        total, available, _, lines = json.loads(said_in(inner, command=[sys.executable, "-c", PROGRAM]))
        assert total == LIMIT and 0 < available <= LIMIT
        assert f"{limited}/" in lines[0] and "1,536 MiB of memory" in lines[0]


def test_the_quota_of_a_group_around_ours_counts() -> None:
    if machine.allowed_cores() < 2:
        pytest.skip("half a core is no less than the one that there is")
    with group("cpu") as (limited, inner):
        _, _, usable, lines = json.loads(said_in(inner, command=[sys.executable, "-c", PROGRAM]))
        assert usable == 1 and f"{limited}/" in lines[-1] and "allows 1 of" in lines[-1]


def test_an_engine_that_needs_more_than_its_container_has_is_refused_before_it_starts(tmp_path: Path) -> None:
    model = str(write_checkpoint("llama_gqa", tmp_path))
    with group("memory") as (limited, inner):
        said = said_in(inner, command=[sys.executable, "-c", ENGINE, model], environment={"JAX_PLATFORMS": "cpu"})
    assert "raise the container's limit" in said and "this process may have 1.5 GiB" in said
    assert f"{limited}/" in said, "the log says which file sets the limit"
