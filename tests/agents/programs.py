"""Coding agents from npm, as people start them: each run has a home and a folder of its own, and no network."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("node_modules") / ".bin"
NOWHERE = "http://127.0.0.1:9"
"""A proxy that nobody runs: whatever a program wants from elsewhere fails at once."""


@dataclass
class Run:
    """What a program said until it ended."""

    code: int
    out: str
    err: str


@dataclass
class Programs:
    """Runs the programs in `work`, with the home `home`; both are empty at first."""

    home: Path
    work: Path

    def run(self, name: str, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 120) -> Run:
        """Run a program to its end; one that takes longer is killed with all that it started, and fails the test."""
        path = PROGRAMS / name
        if not path.exists():
            pytest.skip(f"{name} is not installed; make test-agents does that")
        process = subprocess.Popen(
            [str(path), *arguments], cwd=self.work, env=self._environment() | dict(env or {}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{name} had not ended after {seconds} s; it said\n{out}\n{err}")
        return Run(process.returncode, out, err)

    def _environment(self) -> dict[str, str]:
        temporary = self.home / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(temporary), "LANG": "C.UTF-8",
            "SHELL": "/bin/sh", "CI": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
