"""What transformers computes on the models of `tiny_configs/vision.py`, of text and of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config

CLIP = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}}
QWEN3 = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN3 |= {"size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 12}}
SQUARE = {"size": {"height": 56, "width": 56}}
LINES = {"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 112}}
PREPARATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLImageProcessorPil", CLIP),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 30}}),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_vision", "qwen3_5_moe_vision"), ("Qwen2VLImageProcessorPil", QWEN3)
    ),
    "smolvlm": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}),
    "idefics3": ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 84}}),
    **dict.fromkeys(
        ("internvl", "internvl_6b"), ("GotOcr2ImageProcessorPil", SQUARE | {"crop_to_patches": True, "max_patches": 4})
    ),
    "llava": ("LlavaImageProcessorPil", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}),
    "llava_siglip": ("SiglipImageProcessorPil", SQUARE),
    "mistral3_vision": ("PixtralImageProcessorPil", LINES),
    "lighton_ocr": ("PixtralImageProcessorPil", LINES),
    "pixtral": ("PixtralImageProcessorPil", {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 64}}),
    "gemma3": ("Gemma3ImageProcessorPil", SQUARE),
    **dict.fromkeys(("gemma4_e", "gemma4_31b"), ("Gemma4ImageProcessorPil", {"max_soft_tokens": 70})),
}
"""How images are prepared for each model that has a tower here: a class of transformers, and its settings."""

SIZES = ((75, 130), (60, 40))  # of the two images, height and width

GOLDENS = Path(__file__).parent / "goldens/vision"


def rows_first(resize: Any) -> Any:
    """Pillow's `resize` in the order of versions before 13, and of torchvision: rows first."""

    def found(image: Image.Image, size: tuple[int, int], *args: Any, **options: Any) -> Image.Image:
        wide = resize(image, (size[0], image.height), *args, **options)
        return resize(wide, size, *args, **options)

    return found


def images() -> list[Image.Image]:
    """Two images with shapes in them, the same on every machine."""
    found = []
    for number, (height, width) in enumerate(SIZES):
        y, x = np.mgrid[:height, :width] * (1 + number)
        waves = [np.sin(x / 7 + y / 11), np.cos(x / 5) * np.sin(y / 3), ((x // 9 + y // 8) % 3 - 1) * 0.9]
        found.append(Image.fromarray((np.stack(waves, axis=-1) * 127 + 128).astype(np.uint8)))
    return found


def load_vision(name: str) -> dict[str, Any]:
    """The arrays of `make_vision_goldens.py`."""
    with np.load(GOLDENS / f"{name}.npz") as stored:
        return dict(stored)


def write_vision_checkpoint(name: str, directory: Path) -> Path:
    shapes = {tensor: tuple(shape) for tensor, shape in json.loads(str(load_vision(name)["tensor_shapes"])).items()}
    return save_checkpoint(tiny_config(name), draw_weights(name, shapes), directory)
