"""Programs over several devices, each in a process of its own: the number of devices is fixed when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SECONDS = 600


def over_devices(count: int, module: str, out: Path, *arguments: str) -> dict[str, np.ndarray]:
    """The arrays that `python -m module OUT.npz …` writes where the CPU counts as `count` devices."""
    devices = {"JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, "-m", module, str(out), *arguments]
    subprocess.run(command, env=os.environ | devices, cwd=Path(__file__).parents[1], check=True, timeout=SECONDS)
    with np.load(out) as stored:
        found = dict(stored)
    assert found.pop("devices") == count
    return found
