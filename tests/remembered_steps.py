"""Steps that engines of one module of tests have in common, which are traced and compiled once.

Most tests start an engine of the same tiny models and settings, and nine tenths of such a start is making its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxllm.compat import compile_lowered
from jaxllm.config import EngineConfig
from jaxllm.engine.device import executables
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.saved import SavedExecutables
from jaxllm.engine.start import build
from jaxllm.engine.start.plan import Blueprint


class Remembered(SavedExecutables):
    """In place of files: what was compiled, as it is, by the same digest of all that it depends on."""

    def __init__(self, blueprint: Blueprint, mesh: Mesh, steps: dict[tuple[str, Key], jax.stages.Compiled]):
        super().__init__(None, build.step_manifest(blueprint, mesh), mesh.devices.flatten().tolist())
        self._steps = steps

    def load(self, key: Key, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        return self._steps.get((self.name, key))

    def save(self, key: Key, compiled: jax.stages.Compiled) -> None:
        self._steps[self.name, key] = compiled


@contextmanager
def remembering_steps() -> Iterator[None]:
    """Engines that start here share their steps. A test that changes what a step is made of has to be elsewhere."""
    steps: dict[tuple[str, Key], jax.stages.Compiled] = {}
    saved_executables, compile_step = build.saved_executables, executables.compile_step

    def remembered(config: EngineConfig, blueprint: Blueprint, mesh: Mesh) -> SavedExecutables:
        return saved_executables(config, blueprint, mesh) or Remembered(blueprint, mesh, steps)

    def compiled(lowered: Any, key: Key, platform: str, saved: SavedExecutables | None) -> Any:
        if not isinstance(saved, Remembered):
            return compile_step(lowered, key, platform, saved)
        made = compile_lowered(lowered, executables.COMPILER_OPTIONS.get(platform))
        saved.save(key, made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "saved_executables", remembered)
        patch.setattr(executables, "compile_step", compiled)
        yield
