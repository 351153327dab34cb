"""Work beside the loop."""

from __future__ import annotations

import subprocess
import sys

NEVER_CLOSED = """
import sys
from jaxllm.engine.jobs import Jobs
assert Jobs("x", urgent_threads=1, background_threads=1).submit(lambda: 7).result() == 7
sys.exit(3)
"""


def test_threads_without_work_do_not_keep_a_program_alive():
    """One that leaves by SystemExit, whose status nothing tells, waits for the threads that are busy only."""
    assert subprocess.run([sys.executable, "-c", NEVER_CLOSED], timeout=60).returncode == 3
