"""One engine's process, in its own environment, doing works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# One folder, reached as `peers` by the programs beside it and as `benchmarks.peers` by `python -m benchmarks.…`.
from .install import HERE, JAXLLM, CannotRunError, Peer, environment_variables, last_line
from .workload import Work

FORGOTTEN = ("PYTHONDONTWRITEBYTECODE", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""An installed package has been compiled once and for all, and a library chooses for itself."""
TIMEOUT = 3600  # seconds for one engine to start and do all its works once


def run(
    peer: Peer,
    python: Path,
    model: Path,
    works: Iterable[Work],
    log: Path,
    flags: Iterable[str] = (),
    started: Callable[[int], Any] = lambda pid: None,
) -> Iterator[dict[str, Any]]:
    """The lines that the engine reports, as they come; `started` is told the process's id.

    Raises CannotRunError with the engine's last words, after the works that it had finished.
    """
    command = [python, HERE / peer.runner, "--model", model, "--work", *works, *flags]
    variables = dict(os.environ) if peer is JAXLLM else environment_variables(python.parent.parent)
    for name in FORGOTTEN:
        variables.pop(name, None)
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    with (
        log.open("w") as stderr,
        subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=stderr) as engine,
    ):
        started(engine.pid)
        too_late = threading.Timer(TIMEOUT, engine.kill)
        too_late.start()
        assert engine.stdout is not None
        for line in engine.stdout:
            if line.startswith(b'{"engine"'):
                yield json.loads(line)
        engine.wait()
        too_late.cancel()
    if engine.returncode < 0:
        ended = signal.Signals(-engine.returncode).name
        raise CannotRunError(f"ended by {ended} (the limit is {TIMEOUT} s); see {log}")
    if engine.returncode:
        raise CannotRunError(f"ended with {engine.returncode}: {last_line(log.read_text(errors='replace'))}; see {log}")
