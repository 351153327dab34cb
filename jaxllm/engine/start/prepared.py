"""An engine between its plan and its first step: its executables are being made, and its weights are not there yet."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.sharding import Mesh

from jaxllm import compat, cpu_kernels, machine
from jaxllm.config import CPU_ISA_VARIABLE, EngineConfig, part_of
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.executables import COMPILER_OPTIONS, Executables
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.saved import SETS, CompilingProcess, SavedExecutables, fingerprint
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.scale.lockstep.follower import Follower
from jaxllm.engine.scale.lockstep.leader import Leader, LeadingDevice, LeadingStages
from jaxllm.engine.scale.staged_device import StagedDevice, StageDevice, Stages, keys_of, makes
from jaxllm.engine.start.plan import Blueprint, step_functions
from jaxllm.errors import ConfigError
from jaxllm.models.options import Stage
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.sharding.mesh import Exchange, hand_over, is_here, processes_of
from jaxllm.weights.checkpoint import Checkpoint


class Clock:
    """Laps of the start-up, for the log."""

    def __init__(self) -> None:
        self._laps: list[str] = []
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self._laps.append(f"{name} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)


Weights = tuple[jax.Array, ...]
"""As steps take them."""


class PreparedStage(NamedTuple):
    """A stage of an engine, or all of one that has no stages."""

    blueprint: Blueprint
    mesh: Mesh
    functions: StepFunctions
    executables: Executables


class Prepared(NamedTuple):
    """An engine whose steps are being compiled, and whose weights are not loaded yet."""

    config: EngineConfig
    checkpoint: Checkpoint
    blueprint: Blueprint
    stages: Sequence[PreparedStage]
    """The stages of this process: mostly one, which is the whole engine."""
    meshes: Sequence[Mesh]
    """The devices of all stages."""
    exchange: Exchange | None
    clock: Clock
    files: str
    """The identity of the model's files before any was opened: one that has been replaced since is of another model."""

    @property
    def last(self) -> PreparedStage:
        """The one that samples, in a process that has it."""
        return self.stages[-1]


def new_device(prepared: Prepared, weights: Sequence[Weights], leader: Leader | None) -> Device:
    """The Device that runs the engine's steps in the process that has the last stage, with nothing in its caches;
    `weights` are of each stage that is here.
    """
    last = prepared.last
    parts = last.executables, weights[-1], last.functions.state.new()
    if not prepared.blueprint.stages:
        return Device(*parts) if leader is None else LeadingDevice(leader, *parts)
    stages = new_stages(prepared, weights)
    return StagedDevice(*parts, stages) if leader is None else LeadingStages(leader, *parts, stages)


def new_follower(prepared: Prepared, weights: Sequence[Weights]) -> Device | Stages:
    """The Device, or the stages before it, that run the steps that process 0 sends."""
    own = prepared.last.blueprint.options.stage
    if own is None or own.last:
        return new_device(prepared, weights, leader=None)
    return new_stages(prepared, weights)


def new_stages(prepared: Prepared, weights: Sequence[Weights]) -> Stages:
    """The way through all stages, with those before the last that are here."""
    meshes, exchange = prepared.meshes, prepared.exchange
    here = {
        stage.blueprint.options.stage: Device(stage.executables, own, stage.functions.state.new())
        for stage, own in zip(prepared.stages, weights, strict=True)
        if stage.blueprint.options.stage is not None and not stage.blueprint.options.stage.last
    }
    every = [blueprint.options.stage for blueprint in prepared.blueprint.stages]
    earlier = [StageDevice(stage, here.get(stage)) for stage in every[:-1] if stage is not None]
    ways = [hand_over(*pair, exchange) for pair in itertools.pairwise([*meshes, meshes[0]])]
    functions = prepared.last.functions
    return Stages(earlier, ways, prepared.blueprint.sizes, functions.state.hidden_dtype, functions.features)


ROOT = Path(__file__).parents[2]
TRACED = ("compat.py", "engine", "models", "quantization", "pallas_kernels", "cpu_kernels", "sharding", "requests")
"""The files and folders that a step is made of."""
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
CPU_INFO = Path("/proc/cpuinfo")


def step_manifest(blueprint: Blueprint, mesh: Mesh) -> dict[str, str]:
    """All that the executables of this plan on this mesh depend on."""
    devices = mesh.devices.flatten().tolist()
    device = devices[0]
    on_cpu = device.platform == "cpu"
    spec, sizes, kernels = blueprint.spec, blueprint.sizes, blueprint.options.kernels
    limits = ("max_num_seqs", "max_num_batched_tokens", "decode_steps", "max_model_len", "page_size", "num_pages")
    stated = ", ".join(f"{name} {getattr(sizes, name)}" for name in (*limits, "num_snapshots"))
    draft, tower = blueprint.draft, blueprint.tower
    return {
        "jaxllm": f"sources {sources_digest()}",
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}{''.join(map(_plugin, PLUGINS))}",
        "python": platform.python_version(),
        "compiler": f"{compat.compile_options_digest(devices)}, {COMPILER_OPTIONS.get(device.platform, {})}",
        "devices": f"{device.platform}, {mesh.size} x {device.device_kind}",
        "process": f"{jax.process_index()} of {jax.process_count()}",
        "processor": _processor() if on_cpu else "any",
        "kernels": f"{kernels.name}, {cpu_kernels.isa()}" if kernels.native else kernels.name,
        "model": f"{spec.family.name}, {fingerprint(spec.config)}, {fingerprint(blueprint.params)}",
        "features": f"drafts {blueprint.drafts}, adapters {blueprint.adapters}",
        "draft": "none" if draft is None else f"{fingerprint(draft.spec.shape)}, {fingerprint(draft.params)}",
        "tower": "none" if tower is None else f"{tower.spec.tower}, {fingerprint(tower.tower.params)}",
        "sizes": f"{stated}, caches {fingerprint((sizes.layers, sizes.hidden_size, sizes.vocab_size))}",
        "dtype": blueprint.plan.dtype,
        "expert_parallel": str(blueprint.options.expert_parallel),
        "experts in host memory": str(blueprint.options.host_experts),
        "batches side by side": str(blueprint.options.dp),
        "stage": str(blueprint.options.stage or "all layers"),
    }


@cache
def sources_digest() -> str:
    """The digest of the files that steps, layers and kernels are written in."""
    digest = hashlib.sha256()
    for name in TRACED:
        for file in sorted([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*")):
            if file.suffix in (".py", ".cc", ".h") and file.is_file():
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _plugin(package: str) -> str:
    try:
        return f", {package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Its kind and features, and how many cores XLA parts a loop among."""
    features = ""
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text(errors="replace").splitlines()
        told = ("model name", "flags", "Features", "CPU part")
        features = "\n".join(dict.fromkeys(line for line in lines if line.startswith(told)))
    cores = machine.allowed_cores()
    return f"{platform.machine()}, {fingerprint(features)}, {cores} cores, NPROC {os.environ.get('NPROC', '')}"


logger = logging.getLogger(__name__)

LAYERS_WORTH_A_PROCESS = 8


def prepare_stages(
    config: EngineConfig,
    blueprint: Blueprint,
    meshes: Sequence[Mesh],
    hold: Leader | Follower | None,
    processors: Sequence[LogitsProcessor],
) -> list[PreparedStage]:
    """The stages that this process has devices of, or the whole of an engine that has no stages."""
    every = blueprint.stages or (blueprint,)
    here = [(own, mesh) for own, mesh in zip(every, meshes, strict=True) if is_here(mesh)]
    told: dict[str, Any] = {}
    if isinstance(hold, Leader):
        hold.makers = _makers_elsewhere([own.options.stage for own in every], meshes)
    if isinstance(hold, Follower):
        told = {"on_made": _tell_when_made([own.options.stage for own, _ in here], hold.have)}
    stages: list[PreparedStage] = []
    for own, mesh in here:
        stage = own.options.stage
        is_last = stage is None or stage.last
        saved = saved_executables(config, own, mesh)
        options: dict[str, Any] = {"eager": config.enforce_eager, "saved": saved, **told}
        options["own_of"] = partial(keys_of, stage)
        if is_last:
            options |= {"elsewhere": _made_elsewhere(stages, hold)}
        if stage is None and hold is None:
            options |= {"helper": _helper(config, own, saved)}
        functions = step_functions(own, mesh, processors if is_last else ())
        executables = Executables(functions, own.plan.buckets, **options)
        stages = [*stages, PreparedStage(own, mesh, functions, executables)]
    return stages


def _made_elsewhere(earlier: Sequence[PreparedStage], hold: Leader | Follower | None) -> Callable[[Key], bool]:
    """The other stages, and the other processes that follow, have made their parts of a step."""
    made_here = _made_by(earlier)
    if isinstance(hold, Leader):
        return lambda step: made_here(step) and hold.has(step)
    return made_here


def _made_by(earlier: Sequence[PreparedStage]) -> Callable[[Key], bool]:
    """The stages before the last have made their parts of a step."""
    return lambda step: all(
        stage.executables.has(part) for stage in earlier for part in keys_of(stage.blueprint.options.stage, [step])
    )


def _makers_elsewhere(stages: Sequence[Stage | None], meshes: Sequence[Mesh]) -> Callable[[Key], Mapping[Key, int]]:
    """For a step: what other processes make of it, and how many of them make it."""
    here = jax.process_index()
    others = [[process for process in processes_of(mesh) if process != here] for mesh in meshes]

    @cache
    def makers(step: Key) -> Mapping[Key, int]:
        made = {
            (part, process)
            for stage, processes in zip(stages, others, strict=True)
            for part in keys_of(stage, [step])
            for process in processes
        }
        return Counter(part for part, _ in made)

    return makers


def _tell_when_made(stages: Sequence[Stage | None], tell: Callable[[Key], None]) -> Callable[[Key], None]:
    """The function to call with each executable that one of a process's `stages` has made: `tell` is called when all
    have.
    """
    made: Counter[Key] = Counter()
    lock = threading.Lock()

    def on_made(key: Key) -> None:
        with lock:
            made[key] += 1
            complete = made[key] == sum(makes(stage, key) for stage in stages)
        if complete:
            tell(key)

    return on_made


def saved_executables(config: EngineConfig, blueprint: Blueprint, mesh: Mesh) -> SavedExecutables | None:
    """The executables that were made ahead, and those of earlier starts of the same engine, beside XLA's own cache.

    Raises:
        ConfigError: config.executables is no folder.
    """
    cache, shipped = compat.compile_cache(), config.executables
    if cache is None and shipped is None:
        return None
    root = None if cache is None else cache / SETS
    saved = SavedExecutables(root, step_manifest(blueprint, mesh), mesh.devices.flatten().tolist(), shipped)
    saved.touch()
    if shipped is not None:
        if not shipped.is_dir():
            raise ConfigError(f"executables is {str(shipped)!r}, which is no folder; `jaxllm compile` makes one")
        if difference := saved.difference(shipped):
            logger.warning("the executables in %s are not for this engine, which compiles: %s", shipped, difference)
    return saved


def _helper(config: EngineConfig, blueprint: Blueprint, saved: SavedExecutables | None) -> CompilingProcess | None:
    """A process that compiles what no request waits for: on a CPU, which two processes can compile for at once, and if
    there is enough to trace to be worth another start of Python.
    """
    large = blueprint.spec.config.num_layers >= LAYERS_WORTH_A_PROCESS
    if saved is None or saved.root is None or blueprint.plan.platform != "cpu" or not large:
        return None
    plan = blueprint.plan  # not what is free when the process begins
    sizes = {"kv_cache_memory": plan.kv_bytes or None, "state_cache_memory": plan.state_cache_bytes}
    settings = part_of(config, EngineConfig).model_copy(update=sizes)  # a server's has more, which that process refuses
    environment = {CPU_ISA_VARIABLE: cpu_kernels.isa()} if blueprint.options.kernels.native else {}
    return CompilingProcess(settings.model_dump_json(), str(saved.root), saved.name, environment=environment)
