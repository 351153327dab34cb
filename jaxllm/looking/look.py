"""One way to look at a process, whether it is asked over HTTP or over the pipe of an engine."""

from __future__ import annotations

import io
import tempfile
import threading
import time
import zipfile
from pathlib import Path

from jaxllm.errors import InvalidRequestError
from jaxllm.looking import What
from jaxllm.looking.memory import check_jax, device_heap, python_heap
from jaxllm.looking.threads import profile, stacks

_busy = threading.Lock()


def look(what: What, seconds: float) -> bytes:
    """What is asked for, of this process; `profile` and `trace` take so many seconds. It is called in a thread.

    Raises:
        InvalidRequestError: it cannot be had here, or not now.
    """
    match what:
        case "stacks":
            return stacks().encode()
        case "python_heap":
            return python_heap()
        case "device_heap":
            return device_heap()
    if not _busy.acquire(blocking=False):
        raise InvalidRequestError("a profile or a trace of this process is being made; ask again when it is done")
    try:
        return profile(seconds) if what == "profile" else trace(seconds)
    finally:
        _busy.release()


def trace(seconds: float) -> bytes:
    """A zip of what JAX's profiler writes: a trace for Perfetto and one for XProf."""
    check_jax()
    import jax

    with tempfile.TemporaryDirectory(prefix="jaxllm-trace-") as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            time.sleep(seconds)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    archive.write(path, path.name)
        return packed.getvalue()
