"""Answers of engines over several devices that leave experts in host memory, for a process with so many to give.

JAX_NUM_CPU_DEVICES=4 python -m tests.support.experts_over_devices OUT.npz MODEL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.support.batches_over_devices import parallel
from tests.support.parallel_answers import told

LAYOUTS: dict[str, dict[str, Any]] = {
    "a part of each on two devices": {"tensor_parallel_size": 2, "num_experts_offload_per_rank": 12},
    "shared by two devices": {
        "tensor_parallel_size": 2, "enable_expert_parallel": True, "num_experts_offload_per_rank": 5,
        "num_experts_cached_per_rank": 2,
    },
    "shared by two batches on two devices each": {
        **parallel(2, 2, experts=True), "num_experts_offload_per_rank": 4, "num_experts_cached_per_rank": 1,
    },
    "of each of two batches": {**parallel(2, 1, experts=False), "num_experts_offload_per_rank": 9},
    "of each of two stages": {"pipeline_parallel_size": 2, "num_experts_offload_per_rank": 9},
}  # fmt: skip


def main(out: str, model: str, *names: str) -> None:
    """`names` are those of layouts; all without any."""
    found = {name: told(Path(model), every_kind=False, **LAYOUTS[name]) for name in names or LAYOUTS}
    np.savez(out, devices=len(jax.devices()), told=json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
