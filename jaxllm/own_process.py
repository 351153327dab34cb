"""Processes that run a module of ours, whatever program started them.

`multiprocessing` would run the user's program again in each, and `python -m` look for modules in the working directory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import BinaryIO, cast

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection


def command(module: str, *arguments: str) -> list[str]:
    """What runs `python -m MODULE ARGUMENTS...` with this process's own flags and import path."""
    return [*_python(f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"), *arguments]


class PipedProcess:
    """Runs `main(pipe, *arguments)`, a function of a module; `pipe` is this end of the connection between the two.

    The process has the open files of `inherited` by the same numbers, but not on Windows. It ends with `kill`, with
    this object and with the program. Any thread may call any method.
    """

    def __init__(self, main: Callable[..., None], *arguments: object, inherited: Sequence[int] = ()) -> None:
        if main.__module__ == "__main__":
            raise ValueError(f"{main.__qualname__} must be a function of a module: the program itself is not run again")
        self.pipe, theirs = Pipe()
        with _starting:
            try:
                self._process = _start(theirs, inherited)
            finally:
                theirs.close()
            weakref.finalize(self, _kill, self._process, os.getpid())
            _running.add(self)
        try:
            self.pipe.send_bytes(pickle.dumps((main, arguments)))
        except OSError:
            return  # it has ended already, as its exit code says

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where a signal ended it."""
        return self._process.poll()

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()


_running: weakref.WeakSet[PipedProcess] = weakref.WeakSet()
_starting = threading.RLock()
"""Held while a process begins: it is there before it is known."""
START_SECONDS = 2.0
"""How long the end of all processes waits for one that begins."""


def kill_all() -> None:
    """End every PipedProcess of this program now, also one that a thread is about to start."""
    known = _starting.acquire(timeout=START_SECONDS)
    try:
        for process in list(_running):
            process.kill()
    finally:
        if known:
            _starting.release()


def enter(handle: int) -> None:
    """The whole work of a PipedProcess."""
    ignore_signals()
    pipe = PipeConnection(handle) if sys.platform == "win32" else Connection(handle)
    try:
        main, arguments = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return  # the program that wanted it is gone
    main(pipe, *arguments)


def ignore_signals() -> None:
    """A terminal or a service manager signals all processes; the owner of this one ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _start(theirs: Connection, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    handle = theirs.fileno()
    line = _python(f"from jaxllm.own_process import enter; enter({handle})")
    if sys.platform == "win32":
        os.set_handle_inheritable(handle, True)
        inherited = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, startupinfo=inherited)
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[handle, *inherited])


def _python(code: str) -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -OO, -W, -X …
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the program ends without ending what is not its own
        process.kill()
        process.wait()


Process = subprocess.Popen[bytes]
AnswerLimits = tuple[float, float]
"""The seconds that an answer may take, of the clock and of the processor; 0 is no limit."""

ORPHAN_SECONDS = 10.0
"""A process whose owner has died, and cannot stop it any more, stops itself this long after the deadline."""
OUT_OF_MEMORY = 3
"""The exit status of a process that has met a MemoryError."""
_TOO_MUCH_TIME = -signal.SIGPROF if os.name == "posix" else None
"""That of one that has used more processor time than its answer may take."""

STUCK_SECONDS = 120.0
"""The time by the clock of an answer whose processor time is limited: it may wait, or get little of a processor."""

_HEADER = struct.Struct("<Qdd")


class TimedOut(Exception):
    """The answer was not there at its deadline, or took too much of the processor, and the process was stopped."""


class Died(Exception):
    """The question was more than the process could take: too little memory or stack, or a crash."""


class AskedProcesses:
    """At most `most` processes, started when needed. Any thread may ask; it waits while all are busy."""

    def __init__(self, module: str, *arguments: str, most: int = 1) -> None:
        self._module, self._arguments = module, arguments
        self._places = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._questions: set[_Question] = set()
        self._idle: list[Process] = []
        weakref.finalize(self, _end_all, self._idle).atexit = False  # they end with us, and not with a forked child

    @property
    def processes(self) -> list[Process]:
        with self._lock:
            return self._idle + [question.process for question in self._questions if question.process is not None]

    def ask(self, *pieces: bytes, seconds: float = STUCK_SECONDS, processor_seconds: float = 0.0) -> bytes:
        """The answer to a question that comes in pieces; it may take `seconds`, the start of a process included.

        It may take `processor_seconds` of processor time, on POSIX systems; 0 is no limit. Where somebody kills the
        process meanwhile, as a system without memory does, another one is asked, once.

        Raises:
            TimedOut: it takes longer, or more of the processor.
            Died: the process needs too much memory or crashes, or is ended by `close` meanwhile.
            RuntimeError: the process ends in any other way, which is a fault of its program.
        """
        question, limits = _Question(self._lock), (seconds, processor_seconds)
        with self._places:
            with self._lock:
                self._questions.add(question)
            timer = threading.Timer(seconds, question.stop, (True,))
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

    def _answer(self, question: _Question, pieces: tuple[bytes, ...], limits: AnswerLimits) -> tuple[bytes | None, int]:
        while True:
            process, was_idle = self._take()
            with self._lock:
                question.process = process
                if question.is_stopped:
                    process.kill()
            answer = None
            try:
                assert process.stdin is not None and process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # it ends, and does not read what is asked
                    _send(cast(BinaryIO, process.stdin), pieces, limits)
                if (received := _receive(cast(BinaryIO, process.stdout))) is not None:
                    answer = received[0]
                status = process.wait() if answer is None else 0
            finally:
                with self._lock:
                    question.process = None
                    goes_on = answer is not None and not question.is_stopped
                    if goes_on:
                        self._idle.append(process)
                if not goes_on:
                    _end(process)
            if answer is not None or status != 0 or not was_idle:
                return answer, status
            # It had not been asked for long, and was just ending.

    def _take(self) -> tuple[Process, bool]:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                pipe = subprocess.PIPE
                line = command(self._module, *self._arguments)
                return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL), False
            if process.poll() is None:
                return process, True
            _end(process)


class _Question:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.process: Process | None = None
        self.is_stopped = self.timed_out = False

    def stop(self, timed_out: bool = False) -> None:
        with self._lock:
            self.is_stopped = True
            self.timed_out |= timed_out
            if self.process is not None:
                self.process.kill()


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


def answer_questions(answer: Callable[[bytes], bytes], memory_bytes: int, *, idle_seconds: float | None = None) -> None:
    """Answer what stdin asks, on stdout, until stdin closes: the whole work of a process of `AskedProcesses`.

    On POSIX systems it ends with too much memory or processor time, and after `idle_seconds` without a question.
    """
    if os.name == "posix":
        import resource

        ignore_signals()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        while True:
            if idle_seconds is not None and os.name == "posix":
                is_asked, _, _ = select.select([sys.stdin], [], [], idle_seconds)
                if not is_asked:
                    return
            if (question := _receive(sys.stdin.buffer)) is None:
                return
            content, seconds, processor_seconds = question
            _alarm(seconds + ORPHAN_SECONDS, processor_seconds)
            reply = answer(content)
            _alarm(0.0, 0.0)
            _send(sys.stdout.buffer, (reply,))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _alarm(seconds: float, processor_seconds: float) -> None:
    """End this process, whatever code it is in then, after that much time of the clock or of the processor."""
    if os.name == "posix":
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, processor_seconds)


def _send(pipe: BinaryIO, pieces: tuple[bytes, ...], limits: AnswerLimits = (0.0, 0.0)) -> None:
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
