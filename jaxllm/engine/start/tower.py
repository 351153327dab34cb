"""The tower of a model that sees: planned beside it, and loaded."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.features.images.feature import AbstractTower
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.engine.start.options import choose_kinds
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_tower
from jaxllm.models.vision.spec import VisionSpec, most_patches, vision_spec
from jaxllm.models.vision.tower import TowerConfig
from jaxllm.progress import Progress
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import dummy_parameters, load_parameters

logger = logging.getLogger(__name__)

SMALLEST_BATCH = 256
"""Patches of the smallest batch of a tower; each size has four times those of the one before."""
PART_OPERATIONS = 2**34
"""Operations of a part of the tower on a CPU: about what two cores do in a fortieth of a second."""
MOST_SEEN = 4096
"""Patches of one image that see each other, for an estimate."""
STORE_BYTES = 2**28
"""The most bytes of rows, where media_cache_memory says nothing."""


@dataclass(frozen=True)
class TowerBlueprint:
    """The facts that building a tower needs."""

    spec: VisionSpec
    tower: AbstractTower
    num_bytes: int
    """Bytes of a device for its weights, the rows, and the batch that is in it, of float32 at most."""
    workspace_bytes: int


def tower_blueprint(
    config: EngineConfig, checkpoint: Checkpoint, options: BuildOptions, platform: Platform, max_model_len: int
) -> TowerBlueprint | None:
    """Plan the tower of a checkpoint; None if it has none, or if no images are wanted.

    Raises:
        ConfigError: there is no room for one image, or settings exclude images.
        CheckpointError: as of any model.
    """
    wanted = config.media_cache_memory != 0 and (config.limit_mm_per_prompt or {}).get("image") != 0
    spec = vision_spec(checkpoint) if wanted else None
    if spec is None:
        return None
    if config.pipeline_parallel_size > 1 or options.dp > 1:
        logger.warning("images are refused: they need pipeline_parallel_size 1, and no enable_dp_attention")
        return None
    own = replace(options, adapters=None, host_experts=0)
    model, params = abstract_tower(spec.tower, own, choose_kinds(config, checkpoint, spec, own, platform))
    processor = spec.processor(_no_text).limited(config.image_min_tokens, config.image_max_tokens)
    row_bytes = spec.tower.row_size * jnp.dtype(options.dtype).itemsize
    largest = most_patches(processor)
    least = largest // spec.tower.patches_per_row * row_bytes
    room = config.media_cache_memory or max(least, min(STORE_BYTES, max_model_len * row_bytes))
    if room < least:
        raise ConfigError(f"media_cache_memory is {room}; it must be at least {least}, which an image may take")
    num_rows = room // row_bytes
    sizes = [SMALLEST_BATCH]
    while sizes[-1] < largest:
        sizes.append(4 * sizes[-1])
    blocks = spec.tower.blocks
    width = 2 * spec.tower.inputs + 8 * blocks.hidden_size + 3 * blocks.intermediate_size
    tower = AbstractTower(
        model, params, processor, num_rows, {size: parts_of(spec.tower, size, platform) for size in sizes}
    )
    kept = sum(math.prod(shape) for name, shape in tower.shapes.items() if name != "rows")
    num_bytes = weight_bytes(params, options.tp) + num_rows * row_bytes + kept * 4
    return TowerBlueprint(spec, tower, num_bytes, 4 * sizes[-1] * width)


def parts_of(tower: TowerConfig, patches: int, platform: Platform) -> tuple[range, ...]:
    """The layers that run together: on a CPU about as many as take a fortieth of a second, elsewhere all."""
    blocks, count = tower.blocks, tower.blocks.num_layers
    products = (4 * blocks.hidden_size + (3 if blocks.gated_mlp else 2) * blocks.intermediate_size) * blocks.hidden_size
    operations = 2 * patches * (products + 2 * min(patches, MOST_SEEN) * blocks.hidden_size) * count
    room = PART_OPERATIONS if platform.name == "cpu" else operations
    parts = min(count, -(-operations // room))
    return tuple(range(count * part // parts, count * (part + 1) // parts) for part in range(parts))


def _no_text(text: str) -> list[int]:
    raise AssertionError("an engine prepares pixels, and no prompts")


def load_tower(
    config: EngineConfig, checkpoint: Checkpoint, blueprint: TowerBlueprint, mesh: Mesh, on_progress: Progress | None
) -> tuple[Any, ...]:
    """The tower's parameters on the devices."""
    params = blueprint.tower.params
    if config.load_format == "dummy":
        return dummy_parameters(params, mesh, config.seed)
    return load_parameters(checkpoint, params, blueprint.spec.names, mesh, ignored=("*",), on_progress=on_progress)
