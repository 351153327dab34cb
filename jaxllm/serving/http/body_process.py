"""Large JSON bodies are read in a process of their own: a call that parses megabytes stops every thread of its process.

`python -m jaxllm.serving.http.body_process` is such a process, which gives way to those that answer. A body is checked
and parsed there, and comes back packed (`jaxllm.serving.http.packed`), so that it is unpacked in short calls.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from jaxllm.line_process import Process, end, limit_memory, start
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.body import check_numbers, check_structure, parse_object
from jaxllm.serving.http.packed import pack, unpack

READ_SECONDS = 10
"""Of processor time that one body may take."""
READ_MEMORY_BYTES = 2**30
"""Beside a few times the body's own bytes."""
_NICE = 10
_OUT_OF_MEMORY = 3
"""Its exit status."""
_LENGTH = struct.Struct("<Q")


class BodyProcess:
    """One process, started when it is first needed and again after it has ended; callers wait for each other."""

    def __init__(self, largest: int, memory_bytes: int = READ_MEMORY_BYTES) -> None:
        """`largest` is the most bytes that a body may have."""
        self._memory_bytes = memory_bytes + 16 * largest
        self._process: Process | None = None
        self._lock = threading.Lock()

    def read(self, pieces: Sequence[bytes]) -> dict[str, Any]:
        """The value of a body that came in pieces. Blocks; any thread may call it.

        Raises APIError 400 as `jaxllm.serving.http.body` does, or where it takes too much time or memory to read.
        """
        with self._lock:
            process = self._started()
            reply = _ask(process, pieces)
            if reply is None:
                self._process = None
                status = end(process, kill=False)
                if status >= 0 and status != _OUT_OF_MEMORY:
                    raise RuntimeError(f"the process that reads bodies ended with status {status}")
        if reply is None:
            problem = f"the body takes more than {READ_SECONDS} seconds or {self._memory_bytes:,} bytes to read"
            raise APIError(400, problem, code="body_too_complex")
        read = unpack(reply)
        if "error" in read:
            raise APIError(400, **read["error"])
        return read["value"]

    def close(self) -> None:
        """End the process; what it reads now is refused."""
        process = self._process
        if process is not None:
            process.kill()
            with self._lock:  # whoever waited for it has taken note
                if self._process is process:
                    end(process)
                    self._process = None

    def _started(self) -> Process:
        if self._process is not None and self._process.poll() is not None:
            end(self._process)
            self._process = None
        if self._process is None:
            self._process = start("jaxllm.serving.http.body_process", str(self._memory_bytes))
        return self._process


def _ask(process: Process, pieces: Sequence[bytes]) -> bytes | None:
    """The reply; None where the process died of this body."""
    assert process.stdin is not None and process.stdout is not None
    try:
        _send(process.stdin, *pieces)
    except BrokenPipeError:
        return None
    return _received(process.stdout)


def main(memory_bytes: int) -> None:
    """Read what comes through stdin until it closes."""
    os.nice(_NICE)
    limit_memory(memory_bytes)
    while (raw := _received(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, READ_SECONDS)  # which ends this process, whatever code it is in then
        try:
            reply = _reply(raw)
        except MemoryError:
            sys.exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, reply)


def _reply(raw: bytes) -> bytes:
    try:
        overflow = check_structure(raw)
        value = parse_object(raw)
        if overflow:
            check_numbers(value)
    except APIError as error:
        told = error.body["error"]
        return pack({"error": {name: told[name] for name in ("message", "param", "code")}})
    return pack({"value": value})


def _send(pipe: BinaryIO | Any, *pieces: bytes) -> None:
    pipe.write(_LENGTH.pack(sum(map(len, pieces))))
    for piece in pieces:
        pipe.write(piece)
    pipe.flush()


def _received(pipe: BinaryIO | Any) -> bytes | None:
    """What was sent; None where the other end has closed."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(length)
    content = pipe.read(size)
    return content if len(content) == size else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
