"""Steps that the engines of a run of tests have in common, which are traced and compiled once.

Most tests start an engine of the same tiny models and settings, and nine tenths of such a start is making its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxllm.compat import compile_noting_cache
from jaxllm.config import EngineConfig
from jaxllm.engine.core import executables
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.saved import SavedExecutables
from jaxllm.engine.start import prepared
from jaxllm.engine.start.plan import Blueprint
from jaxllm.folders import make_private


class Remembered(SavedExecutables):
    """Files of every executable that was made with all the same, for the other workers and the next run, and in this
    module of tests the executables themselves.
    """

    def __init__(self, root: Path, manifest: dict[str, str], mesh: Mesh, steps: dict[tuple[str, Key], Any]):
        super().__init__(root, manifest, mesh.devices.flatten().tolist())
        self._steps = steps

    def load(self, key: Key, arguments: tuple[Any, ...]) -> Any:
        step = self._steps.get((self.name, key)) or super().load(key, arguments)
        if step is not None:
            self._steps[self.name, key] = step
        return step

    def save(self, key: Key, compiled: jax.stages.Compiled) -> None:
        self._steps[self.name, key] = compiled

    def write(self, key: Key, compiled: jax.stages.Compiled) -> None:
        super().save(key, compiled)

    def _complain(self, what: str, error: BaseException) -> None:
        """One that cannot be kept is compiled wherever it is needed, as without all this."""

    def _prepare(self, root: Path) -> None:
        """There are thousands of sets, of which the whole folder goes where they become too many."""
        make_private(root / self.name)


@contextmanager
def remembering_steps(root: Path, passes: str) -> Iterator[None]:
    """Engines that start here share their steps. A test that changes what a step is made of has to be elsewhere.

    `passes` says how they are compiled; what was compiled otherwise is another executable.
    """
    steps: dict[tuple[str, Key], Any] = {}
    saved_executables, compile_step = prepared.saved_executables, executables.compile_step

    def remembered(config: EngineConfig, blueprint: Blueprint, mesh: Mesh) -> SavedExecutables:
        found = saved_executables(config, blueprint, mesh)
        if found is not None:
            return found
        return Remembered(root, prepared.step_manifest(blueprint, mesh) | {"passes": passes}, mesh, steps)

    def compiled(lowered: Any, key: Key, platform: str, saved: SavedExecutables | None) -> Any:
        if not isinstance(saved, Remembered):
            return compile_step(lowered, key, platform, saved)
        made, anew = compile_noting_cache(lowered, executables.COMPILER_OPTIONS.get(platform))
        saved.save(key, made)
        if anew:
            saved.write(key, made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "saved_executables", remembered)
        patch.setattr(executables, "compile_step", compiled)
        yield
