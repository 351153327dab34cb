"""Steps of models with the shapes of published ones and a layer or two, as they are made for a TPU v5e."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.core.keys import Key
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.plan import Blueprint, step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.weights import open_checkpoint

CONFIGS = Path(__file__).parents[1] / "reference" / "configs"
MEMORY = 16 * 10**9


def blueprint_of(model: str, directory: Path, tp: int = 1, layers: int = 2, **fields: Any) -> Blueprint:
    values = json.loads((CONFIGS / f"{model}.json").read_text())["config"]
    (directory / "config.json").write_text(json.dumps(values | {"num_hidden_layers": layers}))
    given = {"max_model_len": 8192, "kv_cache_memory": 2**30, **fields}
    config = EngineConfig(model=str(directory), load_format="dummy", tensor_parallel_size=tp, **given)
    return make_blueprint(config, open_checkpoint(directory, "dummy"), Platform("tpu", tp, MEMORY, 0))


def step_of(blueprint: Blueprint, kind: str, mesh: Mesh | AbstractMesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    key = Key("decode", 16) if kind == "decode" else Key("backbone", 512)
    return step_functions(blueprint, mesh).step(key)
