"""Where the library is: in the installed wheel, or else compiled on first use, in a directory of its own version."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib
from filelock import FileLock

from jaxllm.config import CACHE_DIR
from jaxllm.cpu_kernels.compiler import LIBRARY, compile_library, find_compiler, output_of, sources_version
from jaxllm.folders import cache_or_temporary
from jaxllm.machine import cores, memory
from jaxllm.progress import progress_bar

logger = logging.getLogger(__name__)

COMPILER_BYTES = 2**29
"""What a compiler may need for one of the files."""

PACKAGED = Path(__file__).parent / "packaged"
"""Where a wheel has it (`hatch_build.py` at the root of the checkout)."""


def packaged_path() -> Path | None:
    """The library that came with the wheel; None where there is none of these sources for this machine."""
    path = PACKAGED / sources_version(platform.machine()) / LIBRARY
    return path if path.exists() else None


def compiled_path(
    cache: Path = CACHE_DIR / "cpu_kernels",
    compiler: str | None = None,
    machine: str = platform.machine(),
    isas: Sequence[str] | None = None,
) -> Path:
    """The shared library of these sources with `isas`, or all there are, compiled now if `cache` has none with them.

    For another `machine` (as `platform.machine()` names it) with a `compiler` for that.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = compiler or find_compiler()
    version, own = _version(compiler, machine), "" if isas is None else "-" + "-".join(isas)
    for name in (version, version + own):
        if (path := cache / name / LIBRARY).exists():
            return path
    folder = cache_or_temporary(cache, "the CPU kernels", "set XDG_CACHE_HOME")
    path = folder / f"{version}{own}" / LIBRARY
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        if not path.exists():
            _compile(compiler, machine, path, isas)
    return path


def _version(compiler: str, machine: str) -> str:
    """What the result depends on, as a name."""
    parts = sources_version(machine), output_of([compiler, "--version"]), jaxlib.__version__
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, machine: str, path: Path, isas: Sequence[str] | None) -> None:
    what = "the CPU kernels" if isas is None else f"the CPU kernels for {', '.join(isas) or 'any processor'}"
    logger.warning("compiling %s with %s, once for this version; it takes up to a minute", what, compiler)
    begin = time.perf_counter()
    with progress_bar("Compiling the CPU kernels") as on_progress:
        compile_library(compiler, machine, Path(jax.ffi.include_dir()), path, on_progress, _at_once(), isas)
    logger.info("compiled the CPU kernels in %.0f s", time.perf_counter() - begin)


def _at_once() -> int:
    """Compilers that run at a time: one a core, each with the memory that it needs."""
    return max(1, min(cores().usable, memory().available // COMPILER_BYTES))
