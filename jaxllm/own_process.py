"""Processes that run a module of ours, whatever program started them.

`multiprocessing` would run the user's program again in each of them, and `python -m` would look for modules in the
working directory first, where a file of the user may have the name of one of Python's. Neither happens here.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe

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
        """Whether it has ended within `seconds`."""
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
    """The whole work of a PipedProcess. A terminal or a service manager signals all processes: its owner ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "win32":
        pipe = PipeConnection(handle)
    else:
        pipe = Connection(handle)
    try:
        main, arguments = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return  # the program that wanted it is gone
    main(pipe, *arguments)


def _start(theirs: Connection, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process that has inherited the other end of a connection."""
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
