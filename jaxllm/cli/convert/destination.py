"""A file or directory that is there only once it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.errors import ConfigError, one_line


@contextmanager
def new_destination(destination: Path, source: Path) -> Iterator[Path]:
    """Yields a path beside `destination` to write a file or directory to; what is there at the end is renamed to it.

    If anything fails, nothing is left behind.

    Raises:
        ConfigError: `destination` exists, is `source`, or cannot be written.
    """
    if destination.exists() or destination.is_symlink():
        what = "the source itself" if destination.resolve() == source.resolve() else "which exists"
        raise ConfigError(f"destination is {str(destination)!r}, {what}; accepted is a path that does not exist")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.partial-"))
    except OSError as error:
        raise ConfigError(f"destination is {str(destination)!r}: {_reason(error)}") from None
    try:
        yield work / destination.name
        (work / destination.name).rename(destination)
    except OSError as error:
        raise ConfigError(f"destination is {str(destination)!r}: {_reason(error)}; nothing was kept") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return "the disk is full"
    return one_line(error.strerror or error)
