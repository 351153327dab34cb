"""GPUs that a plan may be made for where there is none: their memory, and how fast they read it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.wording import did_you_mean


@dataclass(frozen=True)
class KnownGPU:
    """What NVIDIA states.

    Attributes:
        device: the name in full.
        memory: bytes.
        bandwidth: bytes a second.
        source: where that is stated.
    """

    device: str
    memory: int
    bandwidth: int
    source: str

    def platform(self, num_devices: int) -> Platform:
        """A machine that has as many of it, for planning."""
        return Platform("gpu", num_devices, self.memory, 0, device=self.device)


def _gpu(device: str, gigabytes: int, gigabytes_a_second: int, source: str) -> KnownGPU:
    return KnownGPU(
        f"NVIDIA {device}", gigabytes * 10**9, gigabytes_a_second * 10**9, f"https://www.nvidia.com/{source}"
    )


_DATA_CENTER, _GEFORCE, _PRO = "en-us/data-center/", "en-us/geforce/graphics-cards/", "en-us/products/workstations/"
GPUS: dict[str, KnownGPU] = {
    "a10": _gpu("A10", 24, 600, f"{_DATA_CENTER}products/a10-gpu/"),
    "a100-40gb": _gpu("A100 40GB", 40, 1_555, f"{_DATA_CENTER}a100/"),
    "a100-80gb-pcie": _gpu("A100 80GB PCIe", 80, 1_935, f"{_DATA_CENTER}a100/"),
    "a100-80gb": _gpu("A100 80GB SXM", 80, 2_039, f"{_DATA_CENTER}a100/"),
    "l4": _gpu("L4", 24, 300, f"{_DATA_CENTER}l4/"),
    "l40s": _gpu("L40S", 48, 864, f"{_DATA_CENTER}l40s/"),
    "h100-pcie": _gpu("H100 PCIe", 80, 2_000, f"{_DATA_CENTER}h100/"),
    "h100": _gpu("H100 SXM", 80, 3_350, f"{_DATA_CENTER}h100/"),
    "h100-nvl": _gpu("H100 NVL", 94, 3_900, f"{_DATA_CENTER}h100/"),
    "h200": _gpu("H200", 141, 4_800, f"{_DATA_CENTER}h200/"),
    "b200": _gpu("B200", 180, 8_000, f"{_DATA_CENTER}dgx-b200/"),
    "rtx-3090": _gpu("GeForce RTX 3090", 24, 936, f"{_GEFORCE}30-series/rtx-3090-3090ti/"),
    "rtx-4090": _gpu("GeForce RTX 4090", 24, 1_008, f"{_GEFORCE}40-series/rtx-4090/"),
    "rtx-5090": _gpu("GeForce RTX 5090", 32, 1_792, f"{_GEFORCE}50-series/rtx-5090/"),
    "rtx-6000-ada": _gpu("RTX 6000 Ada Generation", 48, 960, f"{_PRO}rtx-6000/"),
}
"""By the names that `jaxllm plan --gpu` takes."""


def known_gpu(name: str) -> KnownGPU:
    """Raises ConfigError for one that is not in the table."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu is {name!r}{did_you_mean(name, GPUS)}; accepted are {', '.join(GPUS)}")
    return found
