"""What `ptxas` says of the kernels that XLA left in a directory: the registers of each, and what it spills."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "^ptx"}
"""The compiler's options that leave PTX in the directory of `xla_dump_to`, and the program and its thunks as text."""


class Taken(NamedTuple):
    """By one kernel: registers a thread, and bytes a thread that did not fit into them."""

    registers: int
    spilled: int


def taken_by_kernels(directory: Path, architecture: str = "sm_90a") -> dict[str, Taken]:
    found = {}
    for source in directory.glob("*.ptx"):
        if source.stat().st_size:
            command = [_ptxas(), "-v", f"-arch={architecture}", source, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            for name, spilled, registers in re.findall(
                r"Function properties for (\S+)\n.* (\d+) bytes spill stores.*\n.*Used (\d+) registers", said
            ):
                found[name] = Taken(int(registers), int(spilled))
    return found


def _ptxas() -> Path:
    """Of the plugin, which is on PYTHONPATH."""
    roots = os.environ["PYTHONPATH"].split(":")
    return next(path for root in roots for path in Path(root).glob("nvidia/*/bin/ptxas"))
