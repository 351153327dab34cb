"""The steps of each stage that a process has, as they are made ready."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm import compat, cpu_kernels
from jaxllm.config import CPU_ISA_VARIABLE, EngineConfig, part_of
from jaxllm.engine.core.executables import Executables
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.saved import CompilingProcess, SavedExecutables
from jaxllm.engine.scale.lockstep.follower import Follower
from jaxllm.engine.scale.lockstep.leader import Leader
from jaxllm.engine.scale.staged_device import keys_of, makes
from jaxllm.engine.start.manifest import step_manifest
from jaxllm.engine.start.plan import Blueprint, step_functions
from jaxllm.engine.start.prepared import PreparedStage
from jaxllm.errors import ConfigError
from jaxllm.models.options import Stage
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.sharding.mesh import is_here, processes_of

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
    """Whether the other stages, and the other processes that follow, have made their parts of a step."""
    made_here = _made_by(earlier)
    if isinstance(hold, Leader):
        return lambda step: made_here(step) and hold.has(step)
    return made_here


def _made_by(earlier: Sequence[PreparedStage]) -> Callable[[Key], bool]:
    """Whether the stages before the last have made their parts of a step."""
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
    """What to call with each executable that one of a process's `stages` has made: `tell` is called when all have."""
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
    """Those that were made ahead, and those of earlier starts with all the same, beside XLA's own cache.

    Raises:
        ConfigError: config.executables is no folder.
    """
    cache, shipped = compat.compile_cache(), config.executables
    if cache is None and shipped is None:
        return None
    root = None if cache is None else cache / "executables"
    saved = SavedExecutables(root, step_manifest(blueprint, mesh), mesh.devices.flatten().tolist(), shipped)
    saved.touch()
    if shipped is not None:
        if not shipped.is_dir():
            raise ConfigError(f"executables is {str(shipped)!r}, which is no folder; `jaxllm compile` makes one")
        if difference := saved.difference(shipped):
            logger.warning("the executables in %s are not for this engine, which compiles: %s", shipped, difference)
    return saved


def _helper(config: EngineConfig, blueprint: Blueprint, saved: SavedExecutables | None) -> CompilingProcess | None:
    """A process that compiles what nobody waits for: on a CPU, which two processes can compile for at once, and where
    there is so much to trace that it is worth another start of Python."""
    large = blueprint.spec.config.num_layers >= LAYERS_WORTH_A_PROCESS
    if saved is None or saved.root is None or blueprint.plan.platform != "cpu" or not large:
        return None
    plan = blueprint.plan  # not what is free when the process begins
    sizes = {"kv_cache_memory": plan.kv_bytes or None, "state_cache_memory": plan.state_cache_bytes}
    settings = part_of(config, EngineConfig).model_copy(update=sizes)  # a server's has more, which that process refuses
    environment = {CPU_ISA_VARIABLE: cpu_kernels.isa()} if blueprint.options.kernels.native else {}
    return CompilingProcess(settings.model_dump_json(), str(saved.root), saved.name, environment=environment)
