"""Compiles the C++ sources with the host's compiler, on first use, into a directory of their own version."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib
from filelock import FileLock

from jaxllm.config import CACHE_DIR

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wno-psabi", "-Wno-ignored-attributes"),
)
"""No contraction: which additions are fused is written down, so that it is the same for every number of rows. And no
strict aliasing: pages and scratch are read as floats, as bits and as pairs of them."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-DKERNELS_AVX2")
_AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    *("-mprefer-vector-width=512", "-DKERNELS_AVX512"),
)
_X86: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
_ARM: dict[str, tuple[str, ...]] = {
    "neon": ("-march=armv8.2-a+dotprod", "-DKERNELS_NEON"),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm", "-DKERNELS_NEON"),
}
ISAS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""Compiler flags of each ISA of a machine, the best last, beside `portable`, which has none."""


class BuildError(Exception):
    """The library cannot be built here; the message says why in one line."""


def library_path(
    cache: Path = CACHE_DIR / "cpu_kernels", compiler: str | None = None, machine: str = platform.machine()
) -> Path:
    """The shared library of these sources, compiled now if it is not in `cache` yet.

    For another `machine` (as `platform.machine()` names it) with a `compiler` for that.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = compiler or find_compiler()
    path = cache / _version(compiler, machine) / "libjaxllm_cpu_kernels.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        if not path.exists():
            _compile(compiler, machine, path)
    return path


def find_compiler() -> str:
    """`$CXX`, or the first C++ compiler on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler ({', '.join(names)}) is installed")


def _version(compiler: str, machine: str) -> str:
    """What the result depends on, as a name."""
    digest = hashlib.sha256()
    for source in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(_output([compiler, "--version"]).encode())
    digest.update(f"{jaxlib.__version__} {machine} {sys.platform}".encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, machine: str, path: Path) -> None:
    logger.info("compiling the CPU kernels with %s, once for this version (about a minute)", compiler)
    begin = time.perf_counter()
    isas = {"portable": (), **ISAS.get(machine, {})}
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        jobs = [(SOURCES / "kernels.cc", f"kernels_{isa}.o", (*flags, f"-DISA={isa}")) for isa, flags in isas.items()]
        jobs += [
            (source, f"{source.stem}.o", ()) for source in sorted(SOURCES.glob("*.cc")) if source.stem != "kernels"
        ]
        common = [compiler, *FLAGS, "-I", jax.ffi.include_dir()]
        commands = [[*common, *flags, "-c", str(source), "-o", f"{work}/{name}"] for source, name, flags in jobs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_output, commands))
        result = Path(work) / path.name
        _output([compiler, "-shared", "-pthread", "-o", str(result), *(f"{work}/{name}" for _, name, _ in jobs)])
        result.rename(path)
    logger.info("compiled the CPU kernels in %.0f s", time.perf_counter() - begin)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
        raise BuildError(f"{command[0]} failed: {error}")
    return done.stdout
