"""Parts of layers that several definitions in float64 share."""

from __future__ import annotations

from typing import Any

import numpy as np


def rotated(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """Part of each head, halves apart, at positions 0 and on."""
    given = c.get("rope_parameters") or c
    size = int(c["head_dim"] * given["partial_rotary_factor"])
    angles = np.arange(len(x))[:, None] / given["rope_theta"] ** (np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 : size]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., size:]], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
