"""Compiles the C++ sources. Needs the standard library only: building a wheel loads this file by itself."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libjaxllm_cpu_kernels.so"

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
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
_ARM: dict[str, tuple[str, ...]] = {
    "neon": ("-march=armv8.2-a+dotprod", "-DKERNELS_NEON"),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm", "-DKERNELS_NEON"),
}
ISAS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""Compiler flags of each ISA of a machine, the best last, beside `portable`, which has none."""


class BuildError(Exception):
    """The library cannot be built here; the message says why in one line."""


def find_compiler() -> str:
    """`$CXX`, or the first C++ compiler on the path. Raises BuildError: there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler ({', '.join(names)}) is installed")


def sources_version(machine: str) -> str:
    """A name for these sources, compiled with these flags for `machine`, as `platform.machine()` names it."""
    digest = hashlib.sha256()
    for source in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(f"{machine} {sys.platform}".encode())
    return digest.hexdigest()[:16]


def compile_library(
    compiler: str,
    machine: str,
    headers: Path,
    library: Path,
    on_progress: Callable[[int, int], None] | None = None,
    at_once: int | None = None,
    isas: Sequence[str] | None = None,
) -> None:
    """Compile the shared library `library` for `isas` of `machine` (None: all) and `portable`, with a jaxlib's headers.

    `on_progress` is called with (files compiled, files in all). `at_once`: compilers at a time; None: one a core.
    Raises BuildError: the compiler failed.
    """
    known = ISAS.get(machine, {})
    flags_of = {isa: known[isa] for isa in (known if isas is None else isas)} | {"portable": ()}
    present = tuple(f"-DWITH_{isa}" for isa in flags_of)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        jobs = [
            (SOURCES / "kernels.cc", f"kernels_{isa}.o", (*flags, f"-DISA={isa}")) for isa, flags in flags_of.items()
        ]
        jobs += [
            (source, f"{source.stem}.o", present) for source in sorted(SOURCES.glob("*.cc")) if source.stem != "kernels"
        ]
        common = [compiler, *FLAGS, "-I", str(headers)]
        commands = [[*common, *flags, "-c", str(source), "-o", f"{work}/{name}"] for source, name, flags in jobs]
        with ThreadPoolExecutor(at_once or os.cpu_count()) as pool:
            running = [pool.submit(output_of, command) for command in commands]
            for done, compiled in enumerate(as_completed(running)):
                compiled.result()
                if on_progress:
                    on_progress(done + 1, len(running))
        result = Path(work) / library.name
        output_of([compiler, "-shared", "-pthread", "-o", str(result), *(f"{work}/{name}" for _, name, _ in jobs)])
        result.rename(library)


def output_of(command: list[str]) -> str:
    """What a program prints. Raises BuildError: it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
        raise BuildError(f"{command[0]} failed: {error}")
    return done.stdout
