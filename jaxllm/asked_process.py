"""Work that may crash, hang or need too much memory, done by processes that are asked for it and replaced after that.

`AskedProcesses` runs a module as a program, which calls `answer_questions`. Questions and answers
are bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import BinaryIO, cast

from jaxllm import own_process

Process = subprocess.Popen[bytes]

ORPHAN_SECONDS = 10.0
"""A process whose owner has died, and cannot stop it any more, stops itself this long after the deadline."""
OUT_OF_MEMORY = 3
"""The exit status of a process that has met a MemoryError."""
_TOO_MUCH_TIME = -signal.SIGPROF if os.name == "posix" else None
"""That of one that has used more processor time than its answer may take."""

STUCK_SECONDS = 120.0
"""How long an answer may take by the clock where it has a limit of processor time: other programs may leave a process
little of a processor, and one that waits for something uses none."""

_HEADER = struct.Struct("<Qdd")
"""The number of bytes that follow, and the seconds that an answer may take, of the clock and of the processor."""


class TimedOut(Exception):
    """The answer was not there at its deadline, or took too much of the processor, and the process was stopped."""


class Died(Exception):
    """The question was more than the process could take: too little memory or stack, or a crash."""


class AskedProcesses:
    """At most `most` processes at once, started when they are needed; any thread may ask.

    Who asks waits while all of them are busy. The processes end with `close`, with this object and with the program.
    """

    def __init__(self, module: str, *arguments: str, most: int = 1) -> None:
        self._module, self._arguments = module, arguments
        self._places = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._questions: set[_Question] = set()
        self._idle: list[Process] = []
        weakref.finalize(self, _end_all, self._idle).atexit = False  # they end with us, and not with a forked child

    @property
    def processes(self) -> list[Process]:
        """Those that wait for a question, and those that answer one."""
        with self._lock:
            return self._idle + [question.process for question in self._questions if question.process is not None]

    def ask(self, *pieces: bytes, seconds: float = STUCK_SECONDS, processor_seconds: float = 0.0) -> bytes:
        """The answer to a question that comes in pieces; it may take `seconds`, the start of a process included.

        It may take `processor_seconds` of processor time, which a busy machine does not change; 0 is no limit. Outside
        POSIX systems they are not counted.

        Where somebody kills the process meanwhile, as a system without memory does, another one is asked, once.

        Raises:
            TimedOut: it takes longer, or more of the processor.
            Died: the process needs too much memory or crashes, or is ended by `close` meanwhile.
            RuntimeError: the process ends in any other way, which is a fault of its program.
        """
        question, limits = _Question(), (seconds, processor_seconds)
        with self._places:
            with self._lock:
                self._questions.add(question)
            timer = threading.Timer(seconds, question.time_out)
            timer.start()
            try:
                answer, status = self._answer(question, pieces, limits)
                if status == -signal.SIGKILL and not question.is_stopped:  # whoever did it, it need not be the question
                    answer, status = self._answer(question, pieces, limits)
            finally:
                timer.cancel()
                with self._lock:
                    self._questions.discard(question)
        if answer is not None:
            return answer
        if question.timed_out or status == _TOO_MUCH_TIME:
            raise TimedOut
        if status < 0 or status == OUT_OF_MEMORY:
            raise Died
        raise RuntimeError(f"`-m {' '.join((self._module, *self._arguments))}` ended with status {status}")

    def close(self) -> None:
        """End all processes; `Died` is raised for what they are asked now. A later `ask` starts another."""
        with self._lock:
            questions, idle = list(self._questions), list(self._idle)
            self._idle.clear()
        for question in questions:
            question.stop()
        _end_all(idle)

    def _answer(
        self, question: _Question, pieces: tuple[bytes, ...], limits: tuple[float, float]
    ) -> tuple[bytes | None, int]:
        """The answer, or None and the exit status of the process that ended instead."""
        while True:
            process, was_idle = self._take()
            question.begin(process)
            answer = None
            try:
                answer = _exchange(process, pieces, limits)
                status = process.wait() if answer is None else 0
            finally:
                is_stopped = question.finish()
                if answer is None or is_stopped:
                    _end(process)
                else:
                    with self._lock:
                        self._idle.append(process)
            if answer is not None or status != 0 or not was_idle:
                return answer, status
            # Nobody had asked it for long, and it was just ending.

    def _take(self) -> tuple[Process, bool]:
        """A process that waits for a question, or else a new one."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                pipe = subprocess.PIPE
                command = own_process.command(self._module, *self._arguments)
                return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL), False
            if process.poll() is None:
                return process, True
            _end(process)


class _Question:
    """What is being asked; any thread may stop the process that answers it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_stopped = False
        self.process: Process | None = None
        """None before it is given to one, and after that one has answered."""
        self.timed_out = False

    def begin(self, process: Process) -> None:
        with self._lock:
            self.process = process
            if self.is_stopped:
                process.kill()

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            if self.process is not None:
                self.process.kill()

    def time_out(self) -> None:
        self.timed_out = True
        self.stop()

    def finish(self) -> bool:
        """The process is no longer asked; returns whether it has been stopped."""
        with self._lock:
            self.process = None
            return self.is_stopped


def _exchange(process: Process, pieces: tuple[bytes, ...], limits: tuple[float, float]) -> bytes | None:
    """The answer; None if the process ends instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        _send(cast(BinaryIO, process.stdin), pieces, limits)
    except BrokenPipeError:
        return None
    received = _receive(cast(BinaryIO, process.stdout))
    return None if received is None else received[0]


def _end(process: Process) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _end_all(processes: list[Process]) -> None:
    while processes:
        _end(processes.pop())


def answer_questions(
    answer: Callable[[bytes], bytes],
    memory_bytes: int,
    *,
    idle_seconds: float | None = None,
) -> None:
    """Answer what stdin asks, on stdout, until stdin closes: the whole work of a process of `AskedProcesses`.

    The process ends when it needs more than `memory_bytes`, when one answer takes more processor time than it may, and
    when nobody has asked for `idle_seconds`; outside POSIX systems none of these holds.
    """
    if os.name == "posix":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.SIG_IGN
            )  # they reach all processes of a terminal or a service; the owner ends this
    _limit_memory(memory_bytes)
    try:
        while _is_asked_within(idle_seconds) and (question := _receive(sys.stdin.buffer)) is not None:
            content, seconds, processor_seconds = question
            _alarm(seconds + ORPHAN_SECONDS, processor_seconds)
            reply = answer(content)
            _alarm(0.0, 0.0)
            _send(sys.stdout.buffer, (reply,))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _limit_memory(most: int) -> None:
    """Bytes that this process may have; no core is kept of a crash."""
    if os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _alarm(seconds: float, processor_seconds: float) -> None:
    """End this process, whatever code it is in then, after that much time of the clock or the processor; 0 is never."""
    if os.name == "posix":
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, processor_seconds)


def _is_asked_within(seconds: float | None) -> bool:
    if seconds is None or os.name != "posix":
        return True
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _send(pipe: BinaryIO, pieces: tuple[bytes, ...], limits: tuple[float, float] = (0.0, 0.0)) -> None:
    pipe.write(_HEADER.pack(sum(map(len, pieces)), *limits))
    for piece in pieces:
        pipe.write(piece)
    pipe.flush()


def _receive(pipe: BinaryIO) -> tuple[bytes, float, float] | None:
    """What was sent, and the seconds that the answer may take; None if the other end has closed."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size, seconds, processor_seconds = _HEADER.unpack(header)
    content = pipe.read(size)
    return (content, seconds, processor_seconds) if len(content) == size else None
