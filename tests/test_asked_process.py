"""Processes that are asked: what becomes of a question, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxllm import own_process
from jaxllm.own_process import AskedProcesses, Died, TimedOut

WORKER = "tests.support.asked_worker"
PLENTY = 60.0
"""Seconds, for a busy machine."""


@pytest.fixture
def pool() -> Iterator[AskedProcesses]:
    pool = AskedProcesses(WORKER, most=2)
    yield pool
    pool.close()


def pid(pool: AskedProcesses, *pieces: bytes) -> int:
    """That of the process which has answered."""
    return int(pool.ask(*pieces, seconds=PLENTY))


def is_over(process: subprocess.Popen[bytes]) -> bool:
    return process.returncode is not None


def test_one_process_answers_one_question_after_the_other(pool: AskedProcesses) -> None:
    assert pool.processes == []
    assert pool.ask(b"reverse ", b"\n{ab", b"c}", seconds=PLENTY) == b"}cba{\n"
    [process] = pool.processes
    assert pid(pool) == pid(pool) == process.pid
    long = b"x" * 2**22
    assert pool.ask(b"reverse ", long, b"y", seconds=PLENTY) == b"y" + long


@pytest.mark.parametrize("told", [b"exit 0", b"exit 1"])
def test_a_program_that_just_ends_is_at_fault(pool: AskedProcesses, told: bytes) -> None:
    with pytest.raises(RuntimeError, match=rf"^`-m {WORKER}` ended with status {told.decode()[-1]}$"):
        pool.ask(told, seconds=PLENTY)
    assert pool.processes == []


@pytest.mark.parametrize("told", [b"abort", b"allocate 4294967296"])
def test_one_that_dies_of_a_question_is_replaced(pool: AskedProcesses, told: bytes) -> None:
    before = pid(pool)
    with pytest.raises(Died):
        pool.ask(told, seconds=PLENTY)
    assert pid(pool) != before


def test_where_one_is_killed_another_is_asked(pool: AskedProcesses) -> None:
    before = pid(pool)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pool.ask, b"sleep 1", seconds=PLENTY)
        time.sleep(0.3)
        os.kill(before, signal.SIGKILL)
        assert int(asked.result()) != before


def test_a_question_that_has_each_process_killed_is_not_asked_for_ever(pool: AskedProcesses) -> None:
    with pytest.raises(Died):
        pool.ask(b"kill", seconds=PLENTY)


def test_one_that_takes_too_long_is_replaced(pool: AskedProcesses) -> None:
    before = pid(pool)
    began = time.monotonic()
    with pytest.raises(TimedOut):
        pool.ask(b"sleep 60", seconds=0.2)
    assert time.monotonic() - began < 30
    assert pid(pool) != before


def test_the_time_of_a_processor_is_counted_apart_from_that_of_the_clock(pool: AskedProcesses) -> None:
    before = pid(pool)
    assert int(pool.ask(b"sleep 1.5", seconds=PLENTY, processor_seconds=0.5)) == before  # as on a busy machine
    with pytest.raises(TimedOut):
        pool.ask(b"spin 100", seconds=PLENTY, processor_seconds=0.5)
    assert pid(pool, b"spin 1") != before


def test_one_that_is_stuck_is_replaced(pool: AskedProcesses) -> None:
    before = pid(pool)
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(TimedOut):
        pool.ask(b"reverse " + b"x" * 2**22, seconds=0.2)
    assert pid(pool) != before


def test_one_that_died_by_itself_is_replaced(pool: AskedProcesses) -> None:
    before = pid(pool)
    [process] = pool.processes
    process.kill()
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert pid(pool) != before


def test_ctrl_c_does_not_reach_it(pool: AskedProcesses) -> None:
    before = pid(pool)
    os.kill(before, signal.SIGINT)
    assert pid(pool) == before


def test_their_number_is_bounded_and_the_rest_wait(pool: AskedProcesses) -> None:
    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(pid, pool, b"sleep 0.3") for _ in range(5)]
        assert len({question.result() for question in asked}) == 2
    assert len(pool.processes) == 2


def test_who_waits_for_one_does_not_hold_up_who_asks_the_other(pool: AskedProcesses) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.ask, b"sleep 60", seconds=PLENTY)
        assert pool.ask(b"reverse ab", seconds=PLENTY) == b"ba"
        assert not slow.done()
        pool.close()
        with pytest.raises(Died):
            slow.result()


def test_one_that_nobody_asks_ends_and_is_replaced() -> None:
    pool = AskedProcesses(WORKER, "0.05")
    pids = set()
    for number in range(8):  # just before, just when and after it ends
        pids.add(pid(pool))
        time.sleep(0.04 + 0.005 * number)
    assert len(pids) > 1
    pool.close()


def test_closing_ends_them_and_a_later_question_starts_another(pool: AskedProcesses) -> None:
    before = pid(pool)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.ask, b"sleep 60", seconds=PLENTY)
        while not waiting.done() and not any(question.process for question in list(pool._questions)):
            time.sleep(0.01)
        processes = pool.processes
        os.kill(before, signal.SIGSTOP)
        pool.close()
        with pytest.raises(Died):
            waiting.result(30)
    assert processes and all(map(is_over, processes)) and pool.processes == []
    assert pid(pool) != before


def test_they_end_with_their_owner() -> None:
    pool = AskedProcesses(WORKER)
    pid(pool)
    [process] = pool.processes
    del pool
    assert is_over(process)


def test_one_whose_owner_is_gone_ends_by_itself() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", WORKER], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        own_process._send(process.stdin, (b"sleep 60",), (0.1, 0.0))  # type: ignore[arg-type]
        assert process.wait(30) == -signal.SIGALRM


def test_an_answer_that_was_not_waited_for_is_given_to_nobody(
    pool: AskedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(pipe: object) -> None:
        raise KeyboardInterrupt

    before = pid(pool)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_process, "_receive", interrupted)
        pool.ask(b"reverse ab", seconds=PLENTY)
    assert pool.processes == []
    assert pid(pool) != before


def test_others_are_answered_meanwhile(pool: AskedProcesses) -> None:
    with ThreadPoolExecutor(4) as threads:
        slow = threads.submit(pool.ask, b"sleep 60", seconds=PLENTY)
        while not pool.processes:  # else the next question could come first, and its process be asked this one too
            time.sleep(0.01)
        [process] = pool.processes
        assert pool.ask(b"reverse ab", seconds=PLENTY) == b"ba"
        assert not slow.done()
        pool.close()
        with pytest.raises(Died):
            slow.result(PLENTY)
        assert is_over(process)
        with pytest.raises(TimedOut):
            pool.ask(b"sleep 60", seconds=0.2)
        asked = [threads.submit(pool.ask, b"reverse ab", seconds=PLENTY) for _ in range(4)]
        assert [one.result(PLENTY) for one in asked] == [b"ba"] * 4
