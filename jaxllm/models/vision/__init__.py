"""Images: which families have a tower, and what a checkpoint says of its tower and of how images are prepared.

Importing this imports no JAX; a family's file does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.errors import CheckpointError

if TYPE_CHECKING:
    from jaxllm.models.vision.processor import Encode, ImageOptions, Processor
    from jaxllm.models.vision.tower import TowerConfig
    from jaxllm.weights.checkpoint import Checkpoint
    from jaxllm.weights.names import NameMap, Pattern

FILES: dict[str, str] = {  # `model_type` in config.json -> the file of `families/` that has its tower
    **dict.fromkeys(("smolvlm", "idefics3"), "idefics"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen"),
    **dict.fromkeys(("gemma3", "gemma4"), "gemma"),
    **dict.fromkeys(("mistral3", "lighton_ocr"), "pixtral"),
    "llava": "llava",
    "internvl": "internvl",
}


class VisionFamily(NamedTuple):
    """One family's tower and its way with images, all made of what config.json holds.

    Attributes:
        tower: KeyError: a key is missing.
        names: the tensors of the tower's parameters; "tower." and "projector." stand for their prefixes.
        anchors: for each of these prefixes the end of a tensor's name that follows it.
        processor: of a config.json, of what says how images are prepared, and of a tokenizer's function.
    """

    tower: Callable[[dict[str, Any]], TowerConfig]
    names: Callable[[dict[str, Any], TowerConfig], dict[str, Pattern]]
    anchors: dict[str, str]
    processor: Callable[[dict[str, Any], ImageOptions, Encode], Processor]


class VisionSpec(NamedTuple):
    """A checkpoint's tower, its tensors, and its preparation of images.

    Attributes:
        processor: of a tokenizer's function from text to tokens, and of options that replace the checkpoint's.
    """

    tower: TowerConfig
    names: NameMap
    processor: Callable[..., Processor]


def vision_family(c: dict[str, Any]) -> VisionFamily | None:
    """The family of a config.json; None where it has no tower, or none that is supported."""
    kind = c.get("model_type")
    if not isinstance(kind, str) or kind not in FILES or not isinstance(c.get("vision_config"), dict):
        return None
    found: VisionFamily | None = import_module(f"{__name__}.families.{FILES[kind]}").family(c)
    return found


def vision_spec(checkpoint: Checkpoint) -> VisionSpec | None:
    """A checkpoint's tower, if it has one. Raises CheckpointError where its config does not describe one."""
    from jaxllm.weights.names import expand, renamed

    c = checkpoint.config
    family = vision_family(c) if checkpoint.format == "safetensors" else None
    if family is None:
        return None
    try:
        tower = family.tower(c)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its vision_config has no {error.args[0]!r}") from None
    names = expand(family.names(c, tower), tower.blocks.num_layers)
    stated = image_options(checkpoint.path)
    stated.pop("crop_to_patches", None)  # transformers' processor of InternVL cuts images whatever its file says

    def processor(encode: Encode, options: ImageOptions | None = None) -> Processor:
        return family.processor(c, {**stated, **(options or {})}, encode)

    return VisionSpec(tower, renamed(names, _renaming(checkpoint.tensors, family.anchors)), processor)


def image_options(folder: Path) -> dict[str, Any]:
    """What a model's folder says of how images are prepared; empty where it says nothing."""
    from jaxllm.weights.folder import read_object

    if (folder / "processor_config.json").is_file():
        found = read_object(folder, "processor_config.json").get("image_processor")
        if isinstance(found, dict):
            return found
    name = "preprocessor_config.json"
    return read_object(folder, name) if (folder / name).is_file() else {}


def _renaming(tensors: Iterable[str], anchors: dict[str, str]) -> Callable[[str], str]:
    ends = {
        prefix: min((name for name in tensors if name.endswith(end)), key=len, default=f"{prefix}{end}")
        for prefix, end in anchors.items()
    }
    prefixes = {prefix: name.removesuffix(anchors[prefix]) for prefix, name in ends.items()}

    def rename(name: str) -> str:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(prefix, "") + name.removeprefix(prefix)

    return rename
