"""A chosen tenth of the tests on every Python of this machine, with the newest and the oldest versions that we allow.

    python tests/versions.py                  # each Python with the newest versions, then the oldest with the oldest
    python tests/versions.py 3.12 oldest      # these alone
    python tests/versions.py --newest-python  # the newest that we support, or else this one; `make` takes it

Pythons are looked for on PATH and among pyenv's. Each gets an environment of its own in .venv-versions; the tests are
those marked `every_version`. Any Python can run this file: it needs nothing but the standard library.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
OLDEST = "oldest"
"""Names the oldest Python that is here, with the lowest versions that pyproject.toml allows."""

_ASK = "import ensurepip, platform, venv; print(platform.python_implementation(), platform.python_version())"


def supported() -> list[str]:
    """The Pythons that pyproject.toml names, oldest first: '3.11', …"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def interpreters() -> dict[str, Path]:
    """By version, oldest first, the CPythons of this machine that run and can make environments."""
    found = {}
    for version in supported():
        candidates = [Path(part, f"python{version}") for part in os.get_exec_path()] + _of_pyenv(version)
        if sys.version_info[:2] == tuple(map(int, version.split("."))):
            candidates.append(Path(sys.executable))
        path = next((path for path in candidates if _runs(path, version)), None)
        if path is not None:
            found[version] = path
    return found


def _of_pyenv(version: str) -> list[Path]:
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")  # both work without a home directory
    found = glob.glob(os.path.join(root, "versions", f"{version}.*", "bin", f"python{version}"))
    return [Path(path) for path in sorted(found, reverse=True)]


def _runs(path: Path, version: str) -> bool:
    """Whether it is that Python: pyenv's shims of versions that are not active are there, and do not run."""
    if not os.access(path, os.X_OK):
        return False
    asked = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.startswith(f"CPython {version}.")


def prepare(name: str, python: Path) -> Path:
    """An environment with this checkout installed into it as its tests need it; returns its Python."""
    directory = ENVIRONMENTS / name
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", "--seed", "--python", python, directory], check=True)
    resolution = ["--resolution", "lowest-direct"] if name == OLDEST else ["--upgrade"]
    inside = directory / "bin" / "python"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", inside, *resolution, "--editable", f"{ROOT}[dev]"], check=True
    )
    return inside


def main(arguments: Sequence[str]) -> int:
    """0 if all passed, 1 if some failed, 2 for a name that means nothing here."""
    here = interpreters()
    if list(arguments) == ["--newest-python"]:
        print(list(here.values())[-1] if here else sys.executable)
        return 0
    if not here:
        print(f"no Python {', '.join(supported())} was found on PATH or among pyenv's", file=sys.stderr)
        return 2
    known = {**here, OLDEST: next(iter(here.values()))}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        print(f"{unknown[0]} is not here; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in arguments or known:
        inside = prepare(name, known[name])
        print(f"== {name}: {_versions(inside)}", flush=True)
        tests = [inside, "-m", "pytest", "-n", "3", "--dist", "worksteal", "-m", "every_version and not thorough"]
        if name == OLDEST:  # whose libraries themselves call what has been deprecated since
            tests += ["-W", "default::DeprecationWarning"]
        if subprocess.run(tests, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"== {'failed: ' + ', '.join(failed) if failed else 'all passed'}")
    return int(bool(failed))


def _versions(python: Path) -> str:
    program = (
        "import platform; from importlib.metadata import version; print('Python', platform.python_version(), "
        "*(f'{name} {version(name)}' for name in ('jax', 'flax', 'numpy', 'transformers')), sep=', ')"
    )
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
