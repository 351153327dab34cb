"""Compiled steps made of a model's shapes, without its weights: ahead of a start, or beside it in another process.

`python -m jaxllm.engine.start.ahead CONFIG OUTPUT SET` is that process. It says the name of each step that is saved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.engine.core.executables import Executables, compile_step
from jaxllm.engine.core.jobs import BACKGROUND_NICENESS
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.saved import SavedExecutables
from jaxllm.engine.scale.staged_device import keys_of
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.plan import step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.prepared import step_manifest
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import ConfigError
from jaxllm.sharding.clusters import settled
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights.source import resolve_model


@under_own_settings
def compile_ahead(
    config: EngineConfig,
    output: Path,
    *,
    expected: str | None = None,
    on_key: Callable[[Iterable[Key], Key], None] = lambda keys, key: None,
    on_saved: Callable[[Key], None] = lambda key: None,
) -> list[Path]:
    """Compile every step that an engine of this config plans, and save them in a folder of `output` for each stage.

    Returns those folders. Executables that are there already stay. `on_key` is told of all steps of a stage and of the
    one whose turn it is, `on_saved` of each that is there. `expected` is the name that the folder must have.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: as the engine's start would.
        OSError: the folder cannot be written.
        ValueError: these are not the executables that were expected.
    """
    if config.multi_process or settled(config).in_group:
        setting = "multi_process is true" if config.multi_process else f"num_processes is {config.num_processes}"
        raise ConfigError(
            f"{setting}: executables are made ahead for one process; several "
            "keep theirs in compile_cache_dir by their first start"
        )
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_model(config, path)
    meshes = build_meshes(config.tensor_parallel_size, config.pipeline_parallel_size, config.num_batches)
    whole = make_blueprint(config, checkpoint, Platform.of(meshes[0].devices.flat[0]))
    checkpoint.close()
    output.mkdir(parents=True, exist_ok=True, mode=0o700)
    folders = []
    for blueprint, mesh in zip(whole.stages or (whole,), meshes, strict=True):
        saved = SavedExecutables(output, step_manifest(blueprint, mesh), mesh.devices.flatten().tolist())
        if expected not in (None, saved.name):
            raise ValueError(f"the executables would be {saved.name}, and {expected} are wanted")
        functions = step_functions(blueprint, mesh)
        stage = blueprint.options.stage
        keys = Executables(functions, blueprint.plan.buckets, eager=True, own_of=partial(keys_of, stage)).plan()
        for key in keys:
            on_key(keys, key)
            if not saved.has(key):
                function, arguments = functions.step(key)
                compile_step(function.lower(*arguments), key, functions.platform, saved)  # type: ignore[attr-defined]
            if not saved.has(key):
                raise OSError(f"{key} could not be saved in {output}")
            on_saved(key)
        folders.append(output / saved.name)
    return folders


def main(config: str, output: str, expected: str) -> None:
    os.nice(BACKGROUND_NICENESS)
    compile_ahead(
        EngineConfig.model_validate_json(config),
        Path(output),
        expected=expected,
        on_saved=lambda key: print(key, flush=True),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
