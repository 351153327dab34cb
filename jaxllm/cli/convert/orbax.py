"""A directory of Orbax arrays that an engine restores as they are."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from jaxllm.cli.convert.plan import copy_tokenizer, plan_conversion
from jaxllm.config import EngineConfig
from jaxllm.engine.start.build import eos_token_ids
from jaxllm.models.registry import with_importance
from jaxllm.models.tasks import read_tasks
from jaxllm.progress import Progress
from jaxllm.quantization.coded import Ordered
from jaxllm.quantization.weight import DenseKind, Fused, Weight, WeightKind
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.folder import MANIFEST
from jaxllm.weights.loader import ParamSpec, Value, read_parameters
from jaxllm.weights.saved import ARRAYS, VERSION, Manifest, SavedTensor, arrays_of, describe, save_arrays

logger = logging.getLogger(__name__)


def write_orbax(config: EngineConfig, checkpoint: Checkpoint, target: Path, on_progress: Progress | None) -> None:
    """Weights as one device keeps them, before any tiles; see `weights.saved`. All of them are in memory at the end."""
    plan = plan_conversion(config, checkpoint)
    for note in plan.notes:
        logger.warning(note)
    weighed = with_importance(checkpoint, plan.spec, config.imatrix)
    described: dict[str, SavedTensor] = {}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    target.mkdir()
    for done, (spec, value) in enumerate(
        zip(plan.params, read_parameters(weighed, plan.params, plan.spec.names, plan.spec.ignored), strict=True), 1
    ):
        for name, kind, part in _parts(spec, value):
            described[name] = SavedTensor(part.shape, describe(kind))
            arrays[name] = arrays_of(part) if isinstance(part, Weight) else {"array": part}
        if on_progress:
            on_progress(done, len(plan.params))
    save_arrays(target / ARRAYS, arrays)
    manifest = Manifest(
        version=VERSION,
        made_by=f"jaxllm {version('jaxllm')}",
        source=config.model,
        family=plan.spec.family.name,
        decoder=msgspec.to_builtins(plan.spec.config),
        tasks=msgspec.to_builtins(read_tasks(checkpoint, plan.spec.config.encoder is not None)),
        eos_token_id=eos_token_ids(checkpoint),
        isq=config.isq,
        isq_map=dict(config.isq_map or {}),
        tensors=described,
    )
    (target / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    copy_tokenizer(config, checkpoint, target)


def _parts(spec: ParamSpec, value: Value) -> list[tuple[str, WeightKind, Any]]:
    """(name, kind, weight or array) of a parameter; of each segment by itself where they are of several kinds."""
    rows = [segment.rows for segment in spec.layout.segments] if spec.layout else []
    axis = spec.layout.axis if spec.layout else 0
    if not isinstance(value, Weight):
        return [(spec.path, DenseKind(np.dtype(spec.dtype)), _rows(value, 0, sum(rows), axis))]
    if not isinstance(value, Fused):
        return [(spec.path, spec.kinds[0], _rows(value, 0, sum(rows), axis))]
    found, segments = [], iter(enumerate(rows))
    for (kind, layout), part in zip(spec.runs, value.parts, strict=True):
        start = 0
        for _ in layout.segments if layout else ():
            index, size = next(segments)
            found.append((f"{spec.path}.{index}", kind, _rows(part, start, start + size, axis)))
            start += size
    return found


def _rows(value: Any, start: int, stop: int, axis: int) -> Any:
    """Some rows of each array, without the padding that follows; all of them where there is no layout."""
    if not stop:
        return value
    if isinstance(value, Ordered):
        return replace(value, weight=_rows(value.weight, start, stop, axis))  # the order is of inputs
    return jax.tree.map(lambda array: array[(slice(None),) * axis + (slice(start, stop),)], value)
