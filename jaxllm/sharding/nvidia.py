"""What this machine tells of its NVIDIA GPUs without CUDA: the driver's file, and `nvidia-smi` if it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxllm.config.values import format_bytes

DRIVER_FILE = Path("/proc/driver/nvidia/version")
NEEDED_DRIVER = {13: 580, 12: 525}  # CUDA -> the oldest driver that runs it
_SMI_SECONDS = 20


@dataclass(frozen=True)
class Card:
    """A GPU as `nvidia-smi` lists it; bytes."""

    name: str
    total: int
    free: int


def cards() -> list[Card]:
    """The GPUs that this process may use, in `nvidia-smi`'s order; empty where it is missing or fails."""
    return [
        Card(", ".join(name), int(total) * 2**20, int(free) * 2**20)
        for *name, total, free in _smi("--query-gpu=name,memory.total,memory.free")
        if total.isdigit() and free.isdigit()
    ]


def used_cards() -> list[Card]:
    """The GPUs that JAX will use in this process, unless told otherwise by then."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu"
    return [] if on_cpu or installed_cuda() is None else cards()


def occupants() -> str:
    """The processes that compute on the GPUs, as 'python (process 17, 70 GiB)'; empty where they cannot be seen."""
    found = []
    for pid, *name, used in _smi("--query-compute-apps=pid,process_name,used_memory"):
        size = f", {format_bytes(int(used) * 2**20)}" if used.isdigit() else ""
        found.append(f"{Path(', '.join(name)).name} (process {pid}{size})")
    return ", ".join(found)


def driver_version() -> str | None:
    """As '580.65.06'."""
    text = DRIVER_FILE.read_text(errors="replace") if DRIVER_FILE.exists() else ""
    if found := re.search(r"Module.*?\s(\d+\.\d[\d.]*)", text):
        return found[1]
    return next((row[0] for row in _smi("--query-gpu=driver_version") if row[0][:1].isdigit()), None)


def installed_cuda() -> int | None:
    """The CUDA that JAX's plugin is for; None where there is no plugin."""
    try:
        return next((major for major in NEEDED_DRIVER if find_spec(f"jax_plugins.xla_cuda{major}")), None)
    except ModuleNotFoundError:  # jax_plugins itself
        return None


def hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def _smi(query: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [program, query, "--format=csv,noheader,nounits", *([f"--id={chosen}"] if chosen else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[part.strip() for part in line.split(",")] for line in lines if line.count(",") or "driver" in query]
