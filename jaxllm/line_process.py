"""Processes that may crash or be stopped, and answer in lines of JSON: one object in, one out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

Process = subprocess.Popen[bytes]


def start(module: str, *arguments: str) -> Process:
    """`python -m module ARGUMENTS`, asked through its stdin."""
    command = (sys.executable, "-m", module, *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def ask(process: Process, line: bytes) -> dict[str, Any] | None:
    """The process's reply; None when it died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    reply = process.stdout.readline()
    return json.loads(reply) if reply.endswith(b"\n") else None


def limit_memory(most: int) -> None:
    """Bytes that this process may have, where the system can hold it to that; no core is kept of a crash."""
    if os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end(process: Process, *, kill: bool = True) -> int:
    """Wait until it is gone, and return its exit status; without `kill` it must be ending by itself."""
    if kill:
        process.kill()
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    return status
