"""The files of a release, each tried as whoever installs it would: `python -m tests.support.build_dist [FOLDER]`.

A source distribution; a wheel for every platform, whose first start compiles the CPU kernels; and on Linux one that has
them, named after the oldest glibc that it runs on. `make dist` runs this.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from jaxllm.weights.source import resolve_model

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MODEL, QUESTION, ANSWER = "smollm2-135m", "What is the capital of Japan?", "Tokyo"
TOOLS = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
"""auditwheel looks for patchelf on the path."""


def build(folder: Path) -> list[Path]:
    """The source distribution, and wheels made of it, so that nothing is missing there."""
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(path.name for path in folder.iterdir()):
        raise SystemExit(f"{folder} has files already ({', '.join(old)}); remove them first")
    _run(BIN / "uv", "build", "--sdist", "--out-dir", folder, ROOT)
    (source,) = folder.glob("*.tar.gz")
    _run(BIN / "uv", "build", "--wheel", "--out-dir", folder, source, JAXLLM_WHEEL_KERNELS="off")
    if sys.platform == "linux":
        with tempfile.TemporaryDirectory() as work:
            _run(BIN / "uv", "build", "--wheel", "--out-dir", work, source, JAXLLM_WHEEL_KERNELS="on")
            (wheel,) = Path(work).glob("*.whl")
            _run(BIN / "auditwheel", "repair", "--wheel-dir", folder, wheel)
    (folder / ".gitignore").unlink(missing_ok=True)  # uv's
    return sorted(folder.iterdir())


def try_out(file: Path) -> None:
    """Install `file` where nothing else is, and let its server answer, without a compiler and with no caches."""
    with tempfile.TemporaryDirectory() as work:
        environment = Path(work, "env")
        python = environment / "bin" / "python"
        _run(BIN / "uv", "venv", "--quiet", "--python", sys.executable, environment)
        # What is compiled into a wheel has been tried with that wheel.
        _run(BIN / "uv", "pip", "install", "--quiet", "--python", python, file, JAXLLM_WHEEL_KERNELS="off")
        alone = {"PATH": str(python.parent), "HOME": work, "CXX": "no-such-compiler", "JAX_PLATFORMS": "cpu"}
        asked = [python, "-c", "import jaxllm, jaxllm.cpu_kernels as c; print(jaxllm.__version__, c.available())"]
        said = subprocess.run(asked, capture_output=True, text=True, env=alone, cwd=work, check=True).stdout.split()
        expected = [version_of(file), str("linux" in file.name)]
        if said != expected:
            raise SystemExit(f"{file.name}: version and kernels are {said}; expected are {expected}")
        answer = _ask_server(python.parent / "jaxllm", alone, work)
        if ANSWER not in answer:
            raise SystemExit(f"{file.name}: {QUESTION!r} was answered {answer!r}")
        print(f"{file.name}: {answer}", flush=True)


def version_of(file: Path) -> str:
    """'jaxllm-0.1.0-py3-none-any.whl', 'jaxllm-0.1.0.tar.gz' -> '0.1.0'."""
    return file.name.removesuffix(".tar.gz").split("-")[1]


def _ask_server(program: Path, environment: dict[str, str], work: str) -> str:
    models = resolve_model(MODEL).parents[1]
    sizes = ["--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--enforce-eager"]
    command = [program, "serve", MODEL, "--port", "0", "--download-dir", models, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=work) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://[\d.:]+", server.stdout.readline())
            if address is None:
                raise SystemExit(f"{program} did not serve")
            body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
            request = urllib.request.Request(
                f"{address.group()}/v1/chat/completions", json.dumps(body | {"model": MODEL}).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=300) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        finally:
            server.terminate()
            server.communicate(timeout=60)


def notebook_wheel() -> str:
    """The name of the wheel that examples/notebook.ipynb installs where there is no jaxllm."""
    text = (ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8")
    (url,) = re.findall(r"https://github\.com/jaxllm/jaxllm/releases/download/[^\s\\\"]+", text)
    return Path(url).name


def _run(*command: str | Path, **environment: str) -> None:
    print("+", *(str(part) for part in command), flush=True)
    subprocess.run(command, check=True, env=TOOLS | environment)


def main(folder: Path) -> None:
    files = build(folder)
    _run(BIN / "twine", "check", "--strict", *files)
    for file in files:
        try_out(file)
    version = version_of(files[0])
    if not re.fullmatch(r"[\d.]+((a|b|rc)\d+)?", version):
        print(f"{version} is no release: PyPI takes one whose commit has a tag, as v0.1.0")
    elif notebook_wheel() not in {file.name for file in files}:
        raise SystemExit(f"examples/notebook.ipynb installs {notebook_wheel()}, which is not among {folder}'s files")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
