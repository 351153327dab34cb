"""`make serve` as what supervises a service runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
ROOT = Path(__file__).parents[1]


def test_a_signal_reaches_the_server(tmp_path: Path) -> None:
    """The environment is another one, whose jaxllm says that it serves and sleeps."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"python": "true", "jaxllm": "echo serving; exec sleep 60"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "-C", str(ROOT), "serve", f"VENV={tmp_path}"]
    make = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert make.stdout is not None
        assert "serving\n" in iter(make.stdout.readline, "")
        make.send_signal(signal.SIGTERM)
        make.communicate(timeout=20)  # until whoever could write there has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(make.pid, signal.SIGKILL)
