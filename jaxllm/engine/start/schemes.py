"""The memory that each way of keeping the weights would take, and the speed that it could decode at."""

from __future__ import annotations

import fnmatch
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import machine
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.engine.start.plan import Blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.weight import Weight
from jaxllm.sharding.devices import find_devices
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.source import resolve_model
from jaxllm.wording import did_you_mean

FLOAT, STORED = "float", "stored"
MEASURED_BYTES = 16 * 2**20, 512 * 2**20
"""Read to measure: as much as the weights are, whose share caches hold on machines with large ones, within these."""
ROUNDS = 10


@dataclass(frozen=True)
class Scheme:
    """One way of keeping a model's weights; bytes are a device's.

    Attributes:
        name: as `--isq` has it; `float` is none, `stored` what the checkpoint has.
        weight_bytes: None where the model does not fit, and why.
        max_model_len: the longest context that its KV pages hold besides.
        bytes_a_token: what decoding one sequence with a short context reads of the weights.
        tokens_per_second: how often that can be read in a second: no decode is faster.
    """

    name: str
    weight_bytes: int | None = None
    bits_a_weight: float | None = None
    max_model_len: int | None = None
    bytes_a_token: int | None = None
    tokens_per_second: float | None = None
    why_not: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `jaxllm plan --json`."""
        return asdict(self)


def compare_schemes(config: EngineConfig, bandwidth: float, platform: Platform | None = None) -> list[Scheme]:
    """Every scheme on this machine, or on `platform`, whose memory one device reads at `bandwidth` bytes a second.

    Allocates nothing.
    """
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_model(config, path)
    try:
        platform = platform or Platform.current(config.gpu_memory_utilization)
        return [_scheme(name, config, checkpoint, platform, bandwidth) for name in (FLOAT, STORED, *SCHEMES)]
    finally:
        checkpoint.close()


def _scheme(name: str, config: EngineConfig, checkpoint: Checkpoint, platform: Platform, bandwidth: float) -> Scheme:
    isq = None if name in (FLOAT, STORED) else name
    update = {"isq": isq, "isq_map": None, "imatrix": None, "dequantize": name != STORED}
    try:
        found = make_blueprint(config.model_copy(update=update), checkpoint, platform)
    except (ConfigError, CheckpointError) as error:
        return Scheme(name, why_not=str(error))
    if (why_not := found.plan.why_not) is not None:
        return Scheme(name, why_not=why_not)
    read = sum(_bytes_read(param, found) for param in found.params)
    return Scheme(
        name,
        found.plan.weight_bytes,
        8 * weight_bytes(found.params, found.options.tp) * found.options.tp / found.plan.num_parameters,
        found.plan.max_model_len,
        read,
        bandwidth / read,
    )


def _bytes_read(param: ParamSpec, blueprint: Blueprint) -> int:
    """Bytes of a parameter that a device reads for one token: a row of an embedding, the chosen experts."""
    held, model = weight_bytes([param], blueprint.options.tp), blueprint.spec.config
    if param.path == "embed.weight" and not model.tie_word_embeddings and isinstance(param.abstract(), Weight):
        return held // param.shape[0]
    if model.moe and fnmatch.fnmatchcase(param.path, "*.mlp.experts.*"):
        return held * model.moe.top_k // model.moe.num_experts
    return held


def measure_bandwidth(nbytes: int | None = None) -> float:
    """Bytes a second that the first device reads of an array of about `nbytes`: the best of a few rounds."""
    least, most = MEASURED_BYTES
    nbytes = most if nbytes is None else min(max(nbytes, least), most)
    if find_devices()[0].platform == "cpu":
        return host_bandwidth(nbytes)
    array = jnp.ones(nbytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    return nbytes / min(_seconds(lambda: total(array).block_until_ready()) for _ in range(ROUNDS))


def host_bandwidth(nbytes: int) -> float:
    parts = np.array_split(np.ones(nbytes // 4, np.int32), machine.compute_threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        return nbytes / min(_seconds(lambda: list(pool.map(np.max, parts))) for _ in range(ROUNDS))


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table_rows(schemes: list[Scheme]) -> list[tuple[str, ...]]:
    """Name, memory, bits a weight, bytes a token, longest context and most tokens a second, as people read them."""
    return [
        (s.name, s.why_not or "", "–", "–", "–", "–")
        if s.weight_bytes is None or s.bytes_a_token is None
        else (
            s.name,
            format_bytes(s.weight_bytes),
            f"{s.bits_a_weight:.2f}",
            format_bytes(s.bytes_a_token),
            f"{s.max_model_len:,}",
            f"{s.tokens_per_second:,.0f}",
        )
        for s in schemes
    ]


@dataclass(frozen=True)
class KnownGPU:
    """A GPU as NVIDIA states it.

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
