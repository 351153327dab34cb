"""What a release is made of: its version, its description, the wheel and the packages that notebooks need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.build_dist import notebook_wheel, version_of

ROOT = Path(__file__).parents[1]


def git(folder: Path, *command: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a build reads, with next to nothing of the package, in a commit without a tag."""
    folder = tmp_path / "checkout"
    files = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "jaxllm/__init__.py")
    for name in (*files, "jaxllm/cpu_kernels/compiler.py", "jaxllm/serving/web/swagger/LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


def build(source: Path, into: Path, kind: str = "--wheel") -> Path:
    command = [Path(sys.executable).with_name("uv"), "build", kind, "--quiet", "--out-dir", into, source]
    subprocess.run(command, check=True, env=os.environ | {"JAXLLM_WHEEL_KERNELS": "off"}, timeout=300)
    (made,) = (*into.glob("*.whl"), *into.glob("*.tar.gz"))
    return made


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.programs
def test_the_version_is_that_of_the_tag(checkout: Path, tmp_path: Path) -> None:
    """Without one it is in development; a source distribution knows it without the history, and an archive does not."""
    untagged = build(checkout, tmp_path / "untagged")
    assert re.fullmatch(r"0\.[\d.]+dev1\+g[0-9a-f]+", version_of(untagged))
    git(checkout, "tag", "v1.2.3")
    source = build(checkout, tmp_path / "source", "--sdist")
    wheel = build(source, tmp_path / "wheel")
    assert version_of(source) == version_of(wheel) == "1.2.3"
    shutil.rmtree(checkout / ".git")
    assert version_of(build(checkout, tmp_path / "archive")) == "0.0.0"
    description = metadata_of(wheel).get_payload()
    assert description.startswith("# jaxllm\n")
    assert not re.findall(r"\]\((?!https://|#)[^)]*", description), "PyPI has no files beside it"


def test_the_notebook_installs_a_wheel_of_the_version_that_comes_next() -> None:
    text = (ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8")
    version = version_of(Path(notebook_wheel()))
    assert f"/releases/download/v{version}/jaxllm-{version}-py3-none-manylinux_" in text
    (unreleased,) = re.findall(r"^## \[Unreleased\]: (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version == unreleased


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("examples/**/*.ipynb")), ids=lambda path: path.stem)
def test_the_extra_has_what_notebooks_import(notebook: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["notebook"], *extras["tables"], "jaxllm"]
    packages = {re.match(r"[\w-]+", one).group().lower() for one in required}  # type: ignore[union-attr]
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) - sys.stdlib_module_names
    assert imported <= packages
    assert imported <= {"jaxllm"} or "pip install 'jaxllm[notebook]'" in "".join(cells[0]["source"])
