"""What transformers computes on the models of `tiny_configs/vision.py`, of text and of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config

GOLDENS = Path(__file__).parent / "goldens/vision"


def load_vision(name: str) -> dict[str, Any]:
    """The arrays of `make_vision_goldens.py`."""
    with np.load(GOLDENS / f"{name}.npz") as stored:
        return dict(stored)


def write_vision_checkpoint(name: str, directory: Path) -> Path:
    shapes = {tensor: tuple(shape) for tensor, shape in json.loads(str(load_vision(name)["tensor_shapes"])).items()}
    return save_checkpoint(tiny_config(name), draw_weights(name, shapes), directory)
