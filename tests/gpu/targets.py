"""GPUs that need not be there, as XLA must know them, and meshes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

H100 = Path(__file__).with_name("h100.txtpb").read_text()
"""Printed by XLA on an H100 SXM."""


def _like_an_h100(major: int, extension: str, minor: int = 0, **values: Any) -> str:
    """Another GPU of whose facts only some differ: its compute capability, and fields of the text by name."""
    capability = f"major: {major}\n    minor: {minor}\n    feature_extension: {extension}"
    text = re.sub(r"major: 9\n    feature_extension: \w+", capability, H100)
    for name, value in values.items():
        text = re.sub(rf"\b{name}: .*", f"{name}: {value}", text)
    return text


TARGETS = {
    "sm_90a": H100,
    "sm_80": _like_an_h100(
        8, "NONE", core_count=108, fpus_per_core=64, clock_rate_ghz=1.41, memory_bandwidth=2_039_040_000_000,
        l2_cache_size=41_943_040, shared_memory_per_core=167_936, shared_memory_per_block_optin=101_376,
        name='"NVIDIA A100-SXM4-80GB"', device_description_str='"NVIDIA A100-SXM4-80GB"',
        platform_version='"Compute Capability 8.0"',
    ),
    "sm_89": _like_an_h100(
        8, "NONE", 9, core_count=142, clock_rate_ghz=2.49, memory_bandwidth=864_000_000_000,
        l2_cache_size=100_663_296, shared_memory_per_core=102_400, shared_memory_per_block_optin=101_376,
        threads_per_core_limit=1536, device_memory_size=47_697_362_944,
        name='"NVIDIA L40"', device_description_str='"NVIDIA L40"',
        platform_version='"Compute Capability 8.9"',
    ),
    "sm_100a": _like_an_h100(
        10, "ACCELERATED_FEATURES", core_count=148, clock_rate_ghz=1.965, memory_bandwidth=7_672_320_000_000,
        l2_cache_size=132_644_864, device_memory_size=191_514_411_008,
        name='"NVIDIA B200"', device_description_str='"NVIDIA B200"',
        platform_version='"Compute Capability 10.0a"',
    ),
}  # fmt: skip
"""An H100, an A100, an L40 and a B200, by what `ptxas` calls their architectures.

The A100 has no more shared memory a block here than its smaller relatives (sm_86), which run the same kernels.
"""


def mesh_of(architecture: str = "sm_90a", tp: int = 1, dp: int = 1) -> Mesh:
    """A (data, tensor) mesh of GPUs that can only be compiled for."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    from jaxllm.sharding.mesh import DATA, TENSOR

    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[architecture], topology=f"1x1x{dp * tp}"
    ).devices
    return Mesh(np.array(devices).reshape(dp, tp), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
