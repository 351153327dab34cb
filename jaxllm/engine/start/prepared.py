"""An engine between its plan and its first step: steps that are being compiled, for weights that are not loaded yet."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.executables import Executables
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.scale.lockstep.leader import Leader, LeadingDevice, LeadingStages
from jaxllm.engine.scale.staged_device import StagedDevice, StageDevice, Stages
from jaxllm.engine.start.plan import Blueprint
from jaxllm.sharding.processes import Exchange, hand_over
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
    """Those of this process: mostly one, which is the whole engine."""
    meshes: Sequence[Mesh]
    """The devices of all stages."""
    exchange: Exchange | None
    clock: Clock

    @property
    def last(self) -> PreparedStage:
        """The one that samples, in a process that has it."""
        return self.stages[-1]


def new_device(prepared: Prepared, weights: Sequence[Weights], leader: Leader | None) -> Device:
    """What runs the engine's steps in the process that has the last stage, with nothing in its caches; `weights` are of
    each stage that is here.
    """
    last = prepared.last
    parts = last.executables, weights[-1], last.functions.state.new()
    if not prepared.blueprint.stages:
        return Device(*parts) if leader is None else LeadingDevice(leader, *parts)
    stages = new_stages(prepared, weights)
    return StagedDevice(*parts, stages) if leader is None else LeadingStages(leader, *parts, stages)


def new_follower(prepared: Prepared, weights: Sequence[Weights]) -> Device | Stages:
    """What runs the steps that process 0 sends."""
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
