"""A checkpoint's tower for images: its configuration, its tensors, and its preparation of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError
from jaxllm.models.vision.families import vision_family
from jaxllm.models.vision.processor import Encode, ImageOptions, Processor
from jaxllm.models.vision.tower import TowerConfig
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.folder import read_object
from jaxllm.weights.names import NameMap, expand, renamed


class VisionSpec(NamedTuple):
    """A checkpoint's tower, its tensors, and its preparation of images.

    Attributes:
        processor: from a tokenizer's function, and from options that take precedence over the checkpoint's.
    """

    tower: TowerConfig
    names: NameMap
    processor: Callable[..., Processor]


def vision_spec(checkpoint: Checkpoint) -> VisionSpec | None:
    """A checkpoint's tower, if it has one. Raises CheckpointError if its config does not describe one."""
    c = checkpoint.config
    family = vision_family(c) if checkpoint.format == "safetensors" else None
    if family is None:
        return None
    try:
        tower = family.tower(c)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its vision_config has no {error.args[0]!r}") from None
    names = family.names(tower) if callable(family.names) else family.names
    rename = _renaming(checkpoint.tensors, family.anchors)
    stated = image_options(checkpoint.path)
    stated.pop("crop_to_patches", None)  # transformers' processor of InternVL cuts images whatever its file says

    def processor(encode: Encode, options: ImageOptions | None = None) -> Processor:
        found = family.processor(c, {**stated, **(options or {})}, encode)
        return found if most_patches(found) <= MOST_PATCHES else found.limited(None, MOST_PATCHES // found.merge**2)

    return VisionSpec(tower, renamed(expand(names, tower.blocks.num_layers), rename), processor)


MOST_PATCHES = 2**14
"""Patches of one tile: larger images are made smaller, unless image_max_tokens asks for them."""


def most_patches(processor: Processor) -> int:
    """The most patches that a tile has."""
    return max(height * width for side in ((4096, 4096), (4096, 1024)) for height, width in processor.grid(*side).tiles)


def image_options(folder: Path) -> dict[str, Any]:
    """The options of a model's folder for preparing images; empty if it has none."""
    if (folder / "processor_config.json").is_file():
        found = read_object(folder, "processor_config.json").get("image_processor")
        if isinstance(found, dict):
            return found
    name = "preprocessor_config.json"
    return read_object(folder, name) if (folder / name).is_file() else {}


def _renaming(tensors: Iterable[str], anchors: dict[str, str]) -> Callable[[str], str]:
    """Puts a checkpoint's prefixes into names. The anchor is the shortest of the names that end with it."""
    prefixes = {
        own: min((name for name in tensors if name.endswith(end)), key=len, default=f"{own}.{end}").removesuffix(end)
        for own, end in anchors.items()
    }

    def rename(name: str) -> str:
        own, rest = name.split(".", 1)
        return prefixes[own] + rest

    return rename
