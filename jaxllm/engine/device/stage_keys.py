"""What each stage of a model runs of an engine's steps."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.engine.device.keys import Key
from jaxllm.models.options import Stage


def keys_of(stage: Stage | None, keys: Iterable[Key]) -> list[Key]:
    """The executables that a stage has for steps; the last one, or the only one, has them by the steps' own names."""
    if stage is None or stage.last:
        return list(dict.fromkeys(keys))
    found = [key for step in keys for key in (layers_of(step), *(tells_first(step) if stage.first else ())) if key]
    return list(dict.fromkeys(found))


def makes(stage: Stage | None, part: Key) -> bool:
    """Whether a stage makes what is called so by the process that has it."""
    if stage is None or part.kind == "admit":
        return True
    if part.kind == "took":
        return stage.first
    return part.kind.endswith("_layers") != stage.last


def layers_of(step: Key) -> Key | None:
    """What a stage before the last runs of a step; None where that concerns the last one alone.

    Whatever a step does with logits, its layers are the same.
    """
    if step.kind == "decode":
        return Key("decode_layers", step.size)
    if step.kind == "backbone":
        return Key("backbone_layers", step.size)
    return step if step.kind == "admit" else None


def tells_first(step: Key) -> list[Key]:
    """What tells the first stage the tokens that a step has sampled."""
    return [Key("took", step.size)] if step.kind in ("decode", "head") else []
