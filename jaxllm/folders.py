"""Where things are kept for the user, and what happens where nothing can be: a cache is an optimisation."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def user_folder(variable: str, default: str) -> Path:
    """jaxllm's folder in the one that `variable` names (as XDG_CACHE_HOME), or in `default` of the home directory.

    A user without a home directory has one in the system's folder for temporary files.
    """
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
    """The file or folder of that name; None where there is none, or where the text is too long for a name.

    Raises PermissionError where that cannot be seen.
    """
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


@cache
def cache_or_temporary(folder: Path, kept: str, remedy: str) -> Path:
    """`folder`, or one of this process alone where it cannot be written, which one warning says.

    `kept` names what would be kept, and `remedy` what to set so that it is.
    """
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
