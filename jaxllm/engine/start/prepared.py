"""An engine between its plan and its first step: steps that are being compiled, for weights that are not loaded yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.executables import Executables
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.stage_keys import keys_of
from jaxllm.engine.device.staged_device import EarlierStage, StagedDevice
from jaxllm.engine.device.step import StepFunctions
from jaxllm.engine.lockstep.leader import Leader
from jaxllm.engine.lockstep.leading_device import LeadingDevice
from jaxllm.engine.start.clock import Clock
from jaxllm.engine.start.plan import Blueprint
from jaxllm.weights.checkpoint import Checkpoint

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
    """Mostly one, which is the whole engine."""
    clock: Clock

    @property
    def last(self) -> PreparedStage:
        """The one that samples."""
        return self.stages[-1]


def made_by(earlier: Sequence[PreparedStage]) -> Callable[[Key], bool]:
    """Whether the stages before the last have made their parts of a step."""
    return lambda step: all(
        stage.executables.has(part) for stage in earlier for part in keys_of(stage.blueprint.options.stage, [step])
    )


def new_device(prepared: Prepared, weights: Sequence[Weights], leader: Leader | None) -> Device:
    """What runs the engine's steps, with nothing in its caches; `weights` are of each stage."""
    last = prepared.last
    parts = last.executables, weights[-1], last.functions.state.new()
    if leader is not None:
        return LeadingDevice(leader, *parts)
    if len(prepared.stages) == 1:
        return Device(*parts)
    before = [
        EarlierStage(Device(stage.executables, own, stage.functions.state.new()), stage.mesh)
        for stage, own in zip(prepared.stages[:-1], weights[:-1], strict=True)
    ]
    return StagedDevice(*parts, last.mesh, before, last.blueprint.sizes)
