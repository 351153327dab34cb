"""Compiled steps made ahead of a start: by `jaxllm compile`, from a model's shapes and without its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.device.executables import Executables, compile_step
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.saved import SavedExecutables
from jaxllm.engine.device.step import StepFunctions
from jaxllm.engine.start.manifest import step_manifest
from jaxllm.engine.start.plan import make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.sharding.mesh import build_mesh
from jaxllm.weights import open_checkpoint
from jaxllm.weights.source import resolve_model

logger = logging.getLogger(__name__)


def compile_ahead(
    config: EngineConfig, output: Path, on_key: Callable[[Iterable[Key], Key], None] = lambda keys, key: None
) -> Path:
    """Compile every step that an engine of this config plans, and save them in a folder of `output`, which is returned.

    What is there already stays. `on_key` is told of all steps and of the one whose turn it is.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: as the engine's start would.
        OSError: the folder cannot be written.
    """
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_checkpoint(path, config.load_format)
    mesh = build_mesh(config.tensor_parallel_size)
    blueprint = make_blueprint(config, checkpoint, Platform.of(mesh.devices.flat[0]))
    checkpoint.close()
    output.mkdir(parents=True, exist_ok=True, mode=0o700)
    saved = SavedExecutables(output, step_manifest(blueprint, mesh), mesh.devices.flatten().tolist())
    functions = StepFunctions(blueprint.model, blueprint.params, mesh, blueprint.sizes)
    keys = Executables(functions, blueprint.plan.buckets, eager=True).plan()
    for key in keys:
        on_key(keys, key)
        if not saved.has(key):
            function, arguments = functions.step(key)
            compile_step(function.lower(*arguments), key, functions.platform, saved)  # type: ignore[attr-defined]
    missing = [str(key) for key in keys if not saved.has(key)]
    if missing:
        raise OSError(f"{', '.join(missing)} could not be saved in {output}")
    return output / saved.name
