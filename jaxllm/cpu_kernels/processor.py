"""Which of our instruction sets this processor has, as the operating system tells it. `dispatch.cc` asks it itself."""

from __future__ import annotations

import platform
from pathlib import Path

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
