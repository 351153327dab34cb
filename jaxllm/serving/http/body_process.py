"""Large JSON bodies are read in a process of their own: a call that parses megabytes stops every thread of its process.

`python -m jaxllm.serving.http.body_process` is such a process, which gives way to those that answer. A body is checked
and parsed there, and comes back packed (`jaxllm.serving.http.packed`), so that it is unpacked in short calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from jaxllm.asked_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.body import check_numbers, check_structure, parse_object
from jaxllm.serving.http.packed import pack, unpack

READ_SECONDS = 10
"""Of processor time that one body may take."""
READ_MEMORY_BYTES = 2**30
"""Beside a few times the body's own bytes."""
_NICE = 10


class BodyProcess:
    """One process, started when it is first needed and again after it has ended; callers wait for each other."""

    def __init__(self, largest: int, memory_bytes: int = READ_MEMORY_BYTES) -> None:
        """`largest` is the most bytes that a body may have."""
        self._memory_bytes = memory_bytes + 16 * largest
        self.processes = AskedProcesses("jaxllm.serving.http.body_process", str(self._memory_bytes))

    def read(self, pieces: Sequence[bytes]) -> dict[str, Any]:
        """The value of a body that came in pieces. Blocks; any thread may call it.

        Raises APIError 400 as `jaxllm.serving.http.body` does, or where it takes too much time or memory to read.
        """
        try:
            reply = self.processes.ask(*pieces, processor_seconds=READ_SECONDS)
        except (TimedOut, Died):
            problem = f"the body takes more than {READ_SECONDS} seconds or {self._memory_bytes:,} bytes to read"
            raise APIError(400, problem, code="body_too_complex") from None
        read = unpack(reply)
        if "error" in read:
            raise APIError(400, **read["error"])
        return read["value"]

    def close(self) -> None:
        """End the process; what it reads now is refused."""
        self.processes.close()


def _answer(raw: bytes) -> bytes:
    try:
        overflow = check_structure(raw)
        value = parse_object(raw)
        if overflow:
            check_numbers(value)
    except APIError as error:
        told = error.body["error"]
        return pack({"error": {name: told[name] for name in ("message", "param", "code")}})
    return pack({"value": value})


if __name__ == "__main__":
    os.nice(_NICE)
    answer_questions(_answer, int(sys.argv[1]))
