"""A place in the host's memory where an engine's process leaves its weights for the one that comes after it."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref


class Keeper:
    """A file without a name, which engine processes inherit: in memory under Linux, on the disk elsewhere.

    It is closed when it is forgotten.
    """

    def __init__(self) -> None:
        self.fd = _open()
        self._closed = weakref.finalize(self, os.close, self.fd)

    @property
    def nbytes(self) -> int:
        """What is kept there now."""
        return os.fstat(self.fd).st_size

    def clear(self) -> None:
        """Keep nothing."""
        os.ftruncate(self.fd, 0)


def _open() -> int:
    if sys.platform == "linux":
        return os.memfd_create("jaxllm-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
