"""The compiled library: the wheel's, or compiled on first use; loaded once, its ISA and threads chosen."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from filelock import FileLock

from jaxllm.compat import check_cpu_targets_at_once
from jaxllm.config import CACHE_DIR, CPU_ISA_VARIABLE
from jaxllm.cpu_kernels.compiler import (
    ISAS,
    LIBRARY,
    BuildError,
    compile_library,
    find_compiler,
    output_of,
    sources_version,
)
from jaxllm.folders import cache_or_temporary
from jaxllm.machine import compute_threads, cores, memory
from jaxllm.progress import progress_bar

logger = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")

_AVX2 = {"avx2", "fma", "f16c", "bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_NEEDS: dict[str, set[str]] = {
    "avx2": _AVX2,
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "neon": {"asimddp"},
    "neon_i8mm": {"asimddp", "i8mm"},
}
"""Linux's names of what each set is made of."""


def runnable_here(isas: list[str], cpuinfo: Path = CPUINFO) -> list[str] | None:
    """Those of `isas` that this processor has, in their order; None where the system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    features = next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), None
    )
    return None if features is None else [isa for isa in isas if features >= _NEEDS[isa]]


def wanted_here(isas: list[str], machine: str) -> list[str] | None:
    """Those of a machine's sets, the best last, that this processor may choose; None: no telling, so all of them.

    A system may refuse AMX's registers to a process, which then takes the set before it.
    """
    found = runnable_here(isas) if machine == platform.machine() else None
    if found is None:
        return None
    return found[-2:] if found[-1:] == ["amx"] else found[-1:]


COMPILER_BYTES = 2**29

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
    """The shared library of these sources with `isas` (None: all), compiled now if `cache` has none.

    Another `machine` (as `platform.machine()` names it) needs its `compiler`. Raises BuildError: there is none, or it
    failed.
    """
    compiler = compiler or find_compiler()
    parts = sources_version(machine), output_of([compiler, "--version"]), jaxlib.__version__
    version = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    own = "" if isas is None else "-" + "-".join(isas)
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


def _compile(compiler: str, machine: str, path: Path, isas: Sequence[str] | None) -> None:
    what = "the CPU kernels" if isas is None else f"the CPU kernels for {', '.join(isas) or 'any processor'}"
    logger.warning("compiling %s with %s, once for this version; it takes up to a minute", what, compiler)
    begin, at_once = time.perf_counter(), max(1, min(cores().usable, memory().available // COMPILER_BYTES))
    with progress_bar("Compiling the CPU kernels") as on_progress:
        compile_library(compiler, machine, Path(jax.ffi.include_dir()), path, on_progress, at_once, isas)
    logger.info("compiled the CPU kernels in %.0f s", time.perf_counter() - begin)


TARGETS = (
    "jaxllm_linear", "jaxllm_mlp", "jaxllm_argmax", "jaxllm_rows", "jaxllm_grouped", "jaxllm_attention",
    "jaxllm_log_sum_exp", "jaxllm_normalise", "jaxllm_running_weights", "jaxllm_causal_conv", "jaxllm_delta_rule",
    "jaxllm_ssd", "jaxllm_low_rank", "jaxllm_zeros",
)  # fmt: skip

PORTABLE, EVERY_ISA = "portable", "all"


class Loaded(NamedTuple):
    library: ctypes.CDLL | None
    reason: str


_loading = threading.Lock()


def load() -> Loaded:
    """Load the library, compiled now if need be, and register its FFI targets with JAX; once a process.

    `$JAXLLM_CPU_ISA` forces an instruction set; `all` compiles every one, and takes the best.
    """
    with _loading:
        return _load()


@functools.cache
def _load() -> Loaded:
    asked = os.environ.get(CPU_ISA_VARIABLE, "")
    known = list(ISAS.get(platform.machine(), {}))
    if asked not in ("", EVERY_ISA, PORTABLE, *known):
        return Loaded(None, _refused(asked, known))
    try:
        library = _packaged() or _registered(compiled_path(isas=_compiled_for(asked, known)))
    except (BuildError, OSError) as error:
        return Loaded(None, str(error))
    if asked not in ("", EVERY_ISA) and not library.jaxllm_set_isa(asked.encode()):
        return Loaded(None, _refused(asked, known))
    library.jaxllm_set_threads(compute_threads())
    return Loaded(library, "")


def _compiled_for(asked: str, known: list[str]) -> list[str] | None:
    """The instruction sets that a first start compiles, beside the portable one; None is all of them."""
    if asked == EVERY_ISA:
        return None
    wanted = wanted_here(known, platform.machine())
    return wanted if not asked or asked in (wanted or ()) else [isa for isa in known if isa == asked]


def _refused(asked: str, known: list[str]) -> str:
    runnable = runnable_here(known) or known
    return f"{CPU_ISA_VARIABLE} is {asked!r}; this machine runs {', '.join([*reversed(runnable), PORTABLE, EVERY_ISA])}"


def _packaged() -> ctypes.CDLL | None:
    """The library of the installed wheel, if it has one that this system and this jaxlib take."""
    path = packaged_path()
    if path is None:
        return None
    try:
        return _registered(path)
    except (OSError, jax.errors.JaxRuntimeError) as error:
        logger.warning("the CPU kernels that came with jaxllm do not run here: %s", str(error).splitlines()[0])
        return None


def _registered(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.jaxllm_isa.restype = ctypes.c_char_p
    for asks in (library.jaxllm_set_isa, library.jaxllm_runs_isa, library.jaxllm_rounds_to_bf16):
        asks.restype = ctypes.c_bool
    library.jaxllm_set_reads_by_group.argtypes = [ctypes.c_bool]
    library.jaxllm_set_reads_by_group.restype = ctypes.c_bool
    check_cpu_targets_at_once()
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return library


def library() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError: it is not `available()`."""
    loaded = load()
    if loaded.library is None:
        raise RuntimeError(f"the CPU kernels are not available: {loaded.reason}")
    return loaded.library


def call(target: str, result: Any, **options: Any) -> Any:
    """`jax.ffi.ffi_call`, with the library loaded."""
    library()
    return jax.ffi.ffi_call(target, result, **options)


def available() -> bool:
    """The kernels can run here; the first call compiles them if need be. `reason()` says why not."""
    return load().library is not None


def reason() -> str:
    """Why the kernels are not available; empty if they are."""
    return load().reason


def keep_to_threads() -> None:
    """Let every call use as many threads as are chosen now."""
    library().jaxllm_set_threads(compute_threads())


def isa() -> str:
    return library().jaxllm_isa().decode()


def runnable_isas() -> list[str]:
    """Every instruction set of this library that this machine has, the best first."""
    lib = library()
    isas = [*reversed(ISAS.get(platform.machine(), {})), PORTABLE]
    return [isa for isa in isas if lib.jaxllm_runs_isa(isa.encode())]


def rounds_to_bf16(isa_name: str) -> bool:
    """Products with bf16 weights, and attention over pages of 16 or 8 bits, round what they multiply to bf16."""
    return library().jaxllm_rounds_to_bf16(isa_name.encode())


@contextlib.contextmanager
def forced(
    isa_name: str | None = None, threads: int | None = None, reads_by_group: bool | None = None
) -> Iterator[None]:
    """For tests: another instruction set, number of threads or maker's way (see kernels.h) for a while, in the whole
    process.

    Raises ValueError: this machine does not have that instruction set.
    """
    lib, before = library(), isa()
    with contextlib.ExitStack() as undo:
        if isa_name is not None:
            if not lib.jaxllm_set_isa(isa_name.encode()):
                raise ValueError(f"the ISA is {isa_name!r}; this machine runs {', '.join(runnable_isas())}")
            undo.callback(lib.jaxllm_set_isa, before.encode())
        if threads is not None:
            lib.jaxllm_set_threads(threads)
            undo.callback(lib.jaxllm_set_threads, compute_threads())
        if reads_by_group is not None:
            undo.callback(lib.jaxllm_set_reads_by_group, lib.jaxllm_set_reads_by_group(reads_by_group))
        yield
