"""Work beside the loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxllm.engine.core.jobs import BACKGROUND_NICENESS, Jobs

SOON = 10.0

NEVER_CLOSED = """
import sys
from jaxllm.engine.core.jobs import Jobs
assert Jobs("x", urgent_threads=1, background_threads=1).submit(lambda: 7).result() == 7
sys.exit(3)
"""


def test_threads_without_work_do_not_keep_a_program_alive():
    """One that leaves by SystemExit, whose status nothing tells, waits for the threads that are busy only."""
    assert subprocess.run([sys.executable, "-c", NEVER_CLOSED], timeout=60).returncode == 3


NICED = """
import os, sys, threading
from jaxllm.engine.core.jobs import Jobs
jobs = Jobs("x", urgent_threads=1, background_threads=1)
here = lambda: os.getpriority(os.PRIO_PROCESS, 0)
begun, hurried = threading.Event(), threading.Event()
def waited_for():
    begun.set()
    assert hurried.wait(60)
    return here()
before = jobs.submit(here, urgent=False).result(60)
job = jobs.submit(waited_for, urgent=False)
assert begun.wait(60)
jobs.hurry(job)
hurried.set()
print(here(), before, job.result(60), jobs.submit(here, urgent=False).result(60), jobs.submit(here).result(60))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priorities of their own")
@pytest.mark.parametrize("niceness", [0, 5, 15])
def test_no_thread_of_a_niced_process_has_a_higher_priority_than_its_own(niceness):
    """As an ordinary user, who cannot raise a priority, and as root, who can."""
    command = ["nice", "-n", str(niceness), sys.executable, "-c", NICED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own, before, waited_for, after, urgent = map(int, done.stdout.split())
    assert own == urgent == min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
    low = min(own + BACKGROUND_NICENESS, 19)
    assert before == after == low
    assert waited_for in (own, low)


def test_where_a_system_refuses_priorities_the_work_is_done_at_its_own(monkeypatch):
    def refuse(*_: int) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "setpriority", refuse)
    working = Jobs("x", urgent_threads=1, background_threads=1)
    assert working.submit(lambda: 7, urgent=False).result(SOON) == 7
    working.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_work_that_fails_in_any_way_fails_alone(error):
    def fail() -> None:
        raise error("x")

    working = Jobs("x", urgent_threads=1, background_threads=1)
    with pytest.raises(error):
        working.submit(fail, urgent=False).result(SOON)
    assert working.submit(lambda: 7, urgent=False).result(SOON) == 7
    working.close()
