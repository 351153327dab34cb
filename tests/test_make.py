"""`make serve` as what supervises a service runs it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import versions

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
ROOT = Path(__file__).parents[1]


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    return path


PYTHON = """
echo "$0 $*" >> $LOG
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho serving\\n' > "$3/bin/jaxllm"
    chmod 700 "$3/bin/jaxllm"
fi
"""
"""Makes an environment whose Python is this one again, with a jaxllm that says that it serves."""


@pytest.mark.parametrize("has_uv", [False, True])
def test_the_first_time_says_at_once_what_is_set_up(tmp_path: Path, has_uv: bool) -> None:
    """And installs with uv if that is there, with pip otherwise; neither is told to be quiet."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    python = write_program(tmp_path / "python", PYTHON)
    names = ("sh", "mkdir", "cp", "chmod", "touch", "grep", "printf")
    tools.mkdir()
    for name in names:
        (tools / name).symlink_to(shutil.which(name) or name)
    if has_uv:
        write_program(tools / "uv", 'echo "uv $*" >> $LOG')
    command = [str(shutil.which("make")), "-C", str(ROOT), "serve", f"VENV={tmp_path / 'env'}", f"PYTHON={python}"]
    environment = {"PATH": str(tools), "LOG": str(log)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    assert said[0].startswith(f"Setting up {tmp_path / 'env'}, once: ") and said[-1] == "serving"
    (install,) = (line for line in log.read_text().splitlines() if "--editable ." in line)
    assert install.startswith("uv pip install " if has_uv else f"{tmp_path / 'env'}/bin/python -m pip install ")
    assert "--quiet" not in install


def test_the_newest_python_is_found_without_starting_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor pyenv's shims, which take seconds each where they say that their version is not the active one."""
    log, newest = tmp_path / "log", versions.supported()[-1]
    for name in ("shims", "tools"):
        for version in versions.supported():
            write_program(tmp_path / name / f"python{version}", f'echo "$0" >> {log}; echo "CPython {version}.1"')
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}{os.pathsep}{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    assert versions.newest_python() == tmp_path / "tools" / f"python{newest}"
    assert log.read_text() == f"{tmp_path / 'tools' / f'python{newest}'}\n"


def test_a_signal_reaches_the_server(tmp_path: Path) -> None:
    """The environment is another one, whose jaxllm says that it serves and sleeps."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"python": "true", "jaxllm": "echo serving; exec sleep 60"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "-C", str(ROOT), "serve", f"VENV={tmp_path}"]
    make = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert make.stdout is not None
        assert "serving\n" in iter(make.stdout.readline, "")
        make.send_signal(signal.SIGTERM)
        make.communicate(timeout=20)  # until whoever could write there has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(make.pid, signal.SIGKILL)
