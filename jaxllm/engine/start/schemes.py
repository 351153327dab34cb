"""What each way of keeping the weights would take, and how fast it could decode."""

from __future__ import annotations

import fnmatch
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.start.checkpoint import open_model
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.engine.start.plan import Blueprint, make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.machine import physical_cores
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.quantization.weight import Weight
from jaxllm.setting_values import format_bytes
from jaxllm.sharding.devices import find_devices
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.source import resolve_model

FLOAT, STORED = "float", "stored"
MEASURED_BYTES = 512 * 2**20
"""Read to measure: far more than caches hold, whose share it still has on machines with large ones."""
ROUNDS = 3


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
    """Of a parameter on a device, for one token: of an embedding a row, of experts those that are chosen."""
    held, model = weight_bytes([param], blueprint.options.tp), blueprint.spec.config
    if param.path == "embed.weight" and not model.tie_word_embeddings and isinstance(param.abstract(), Weight):
        return held // param.shape[0]
    if model.moe and fnmatch.fnmatchcase(param.path, "*.mlp.experts.*"):
        return held * model.moe.top_k // model.moe.num_experts
    return held


def measure_bandwidth() -> float:
    """Bytes a second that the first device reads from its memory: the best of a few rounds over a large array."""
    if find_devices()[0].platform == "cpu":
        return _of_host()
    array = jnp.ones(MEASURED_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    return MEASURED_BYTES / min(_seconds(lambda: total(array).block_until_ready()) for _ in range(ROUNDS))


def _of_host() -> float:
    parts = np.array_split(np.ones(MEASURED_BYTES // 8, np.int64), physical_cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        return MEASURED_BYTES / min(_seconds(lambda: list(pool.map(np.max, parts))) for _ in range(ROUNDS))


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
