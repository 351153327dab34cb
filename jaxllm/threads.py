"""Threads that may be inside a compiler, which cannot be interrupted, when the interpreter ends.

Ordinary threads would hold up the interpreter; daemon threads abort the process when they come back to an interpreter
that is being taken down. So these are daemons, and if some are busy when everything else has ended, the process leaves
without taking the interpreter down. That needs the exit status, which Python keeps to itself after SystemExit; then the
compiles that have begun are waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

EXIT_SECONDS = 0.2
"""How long an exit waits for threads that are about to end."""
FAILED, INTERRUPTED = 1, 130
"""Exit statuses of a program that an exception, or Ctrl-C, has ended."""

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_main_frames: list[FrameType] = []
"""The outermost frame of the main thread: it tells how the program came to its end."""
_noted: list[int] = []
_stack_size = threading.Lock()

T = TypeVar("T")


def start_thread(name: str, target: Callable[[], None], stack_bytes: int = 0) -> threading.Thread:
    """A daemon thread that may call into XLA, with a stack of `stack_bytes`; 0 is the system's own size."""
    if not _main_frames:
        frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
        while frame.f_back is not None:
            frame = frame.f_back
        _main_frames.append(frame)
    thread = threading.Thread(name=name, target=target, daemon=True)
    _threads.add(thread)
    with _stack_size:  # the size is one for all threads that start meanwhile
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def call_with_stack(name: str, stack_bytes: int, function: Callable[[], T]) -> T:
    """`function()` on a thread with a stack of `stack_bytes`, for code that recurses as deeply as its input is."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    start_thread(name, run, stack_bytes).join()
    return result.result()


def note_exit_status(status: int) -> None:
    """Say what the process is about to exit with: after SystemExit nothing else can tell in time."""
    _noted[:] = [status]


def _exit_status() -> int | None:
    """What the process will exit with; None where nothing says: after a program's own SystemExit, and at a prompt."""
    if _noted:
        return _noted[0]
    frame = _main_frames[0]
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
        return 0
    traceback = getattr(sys, "last_traceback", None)
    if traceback is None or traceback.tb_frame is not frame:
        return None
    return INTERRUPTED if isinstance(sys.last_value, KeyboardInterrupt) else FAILED


@atexit.register  # before JAX registers its own, so that this one runs after all that needs the interpreter
def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in _threads):
        return
    status = _exit_status()
    if status is None:
        for thread in list(_threads):
            thread.join()
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it cannot be written, and nothing is left that could say so
            if stream is not None:  # the program was started without it
                stream.flush()
    os._exit(status)
