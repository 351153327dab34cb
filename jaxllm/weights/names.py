"""Where each of a model's parameters comes from in a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor, and what is done to it on the way."""

    name: str
    transform: Transform | None = None


NameMap = dict[str, tuple[Source, ...]]
"""Parameter path (`layers.3.mlp.gate_up.weight`) -> the tensors it is fused from, in order."""

Pattern = str | Source | tuple[str | Source, ...]


def expand(patterns: dict[str, Pattern], num_layers: int) -> NameMap:
    """Write out a table whose keys and tensor names may hold `*` for the layer's number.

    Worked example: `{"layers.*.mlp.down.weight": "blk.*.ffn_down.weight"}` with two layers becomes entries for
    `layers.0.mlp.down.weight` and `layers.1.mlp.down.weight`.
    """
    names: NameMap = {}
    for path, pattern in patterns.items():
        items = pattern if isinstance(pattern, tuple) else (pattern,)
        sources = tuple(Source(item) if isinstance(item, str) else item for item in items)
        for layer in range(num_layers) if "*" in path else (0,):
            names[path.replace("*", str(layer))] = tuple(
                Source(s.name.replace("*", str(layer)), s.transform) for s in sources
            )
    return names


def plus_one(weight: np.ndarray) -> np.ndarray:
    """A norm stored as `w` and applied as `1 + w`."""
    return weight.astype(np.float32) + 1


def unpermute_rope(head_dim: int) -> Transform:
    """Undo GGUF's order of rotary rows in llama-family Q and K: pairs lie side by side there, halves apart here.

    Worked example, head_dim 4: rows `0 2 1 3` (pairs (0, 2) and (1, 3) adjacent) go back to `0 1 2 3`.
    """

    def transform(weight: np.ndarray) -> np.ndarray:
        heads = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
        return heads.swapaxes(1, 2).reshape(weight.shape)

    return transform
