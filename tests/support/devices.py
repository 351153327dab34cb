"""Programs over several devices, each in a process of its own: the number of devices is fixed when it starts."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.support.quick_compile import quick_compile

SECONDS = 1400


def over_devices(count: int, module: str, out: Path, *arguments: str) -> dict[str, np.ndarray]:
    """The arrays that `python -m module OUT.npz …` writes where the CPU counts as `count` devices."""
    devices = {"JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, "-m", __name__, module, str(out), *arguments]
    subprocess.run(command, env=os.environ | devices, cwd=Path(__file__).parents[2], check=True, timeout=SECONDS)
    with np.load(out) as stored:
        found = dict(stored)
    assert found.pop("devices") == count
    return found


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that whichever of the tests' processes comes first has filled, once; the others wait until it is done.

    For what takes long and is the same in all: tests of one module run in several processes.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            (folder / "done").touch()
    return folder


if __name__ == "__main__":
    del sys.argv[0]
    with quick_compile():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
