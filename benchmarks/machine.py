"""The machine that something was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

UNITS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def describe_machine() -> dict[str, Any]:
    """Processor, cores and the vector units that decide these figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    return {
        "date": datetime.date.today().isoformat(),
        "processor": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "vector_units": [
            flag
            for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
            if flag in flags
        ],
    }
