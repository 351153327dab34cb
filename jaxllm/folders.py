"""Where things are kept for the user, and what happens where nothing can be: a cache is an optimisation."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""The beginning of names of files that are being written."""


def user_folder(variable: str, default: str) -> Path:
    """jaxllm's folder in the one that `variable` names, or in `default` of the home directory, or a temporary one."""
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named) / "jaxllm"
    try:
        return Path(default).expanduser() / "jaxllm"
    except RuntimeError:  # no HOME, and no entry in the password file
        return Path(tempfile.gettempdir()) / f"jaxllm-{os.getuid()}" / Path(default).name


def in_home(path: str | os.PathLike[str]) -> Path:
    """'~/x' -> '/home/me/x'. As in a shell, the ~ of somebody without a home directory stays as it is."""
    return Path(os.path.expanduser(path))


def existing(text: str) -> Path | None:
    """The file or folder of that name; None where there is none. Raises PermissionError where that cannot be seen."""
    path = in_home(text)
    try:
        path.stat()
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
    return path


def unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, which is made where it is missing; None where one can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def size_of(path: Path) -> int:
    """The bytes of a file; none where it is gone, as another process may have removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def last_used(path: Path) -> float:
    """The time in seconds when a file or folder was last touched; that of what is gone is the earliest."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone, whatever the umask is."""
    for place in reversed(folder.parents):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def others_may_write(status: os.stat_result) -> bool:
    """Whether others than this user, or root, could have written a file or a folder's entries."""
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """All of a file or none of it, for this user alone. What a killed process leaves begins with `UNFINISHED`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@cache
def cache_or_temporary(folder: Path, kept: str, remedy: str) -> Path:
    """`folder`, or a temporary one if it cannot be written; a warning names what is not `kept` and the `remedy`."""
    reason = unwritable(folder)
    if reason is None:
        return folder
    logger.warning("%s: %s; %s are made anew by each process; %s", folder, reason, kept, remedy)
    temporary = Path(tempfile.mkdtemp(prefix="jaxllm-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def make_once(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill `folder` unless it is there. It appears whole, whichever of several processes is the first."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        write(building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
