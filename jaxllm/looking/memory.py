"""What holds the memory of this process: Python objects, and what is on the devices."""

from __future__ import annotations

import sys
import time
import tracemalloc

from jaxllm.errors import InvalidRequestError
from jaxllm.looking import pprof
from jaxllm.looking.pprof import CodeLine, Sample, ValueKind

OBJECTS, SPACE = ValueKind("inuse_objects", "count"), ValueKind("inuse_space", "bytes")


def python_heap() -> bytes:
    """Python's objects by where they were made, in pprof's format.

    Raises:
        InvalidRequestError: Python does not note it in this process.
    """
    if not tracemalloc.is_tracing():
        raise InvalidRequestError(
            "Python's memory is not traced in this process; start the server with PYTHONTRACEMALLOC=10 in its "
            "environment, which makes Python slower"
        )
    began = time.time()
    samples = []
    for made in tracemalloc.take_snapshot().statistics("traceback"):
        innermost_first = reversed(made.traceback)
        stack = [CodeLine(frame.filename, frame.filename, 0, frame.lineno) for frame in innermost_first]
        samples.append(Sample(stack, [made.count, made.size]))
    return pprof.encode([OBJECTS, SPACE], samples, shown=SPACE, began=began, seconds=0)


def device_heap() -> bytes:
    """Arrays and executables on the devices by where they were made, in pprof's format, as JAX writes it.

    Raises:
        InvalidRequestError: this process has no devices.
    """
    check_jax()
    import jax

    return jax.profiler.device_memory_profile()


def check_jax() -> None:
    """Raises InvalidRequestError where this process does not run JAX."""
    if "jax" not in sys.modules:
        raise InvalidRequestError("this process does not use JAX; name one that does, as process=MODEL")
