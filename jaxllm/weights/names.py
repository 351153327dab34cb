"""Where each of a model's parameters comes from in a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.quantization.stored import Coding

Transform = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor, and what is done to it on the way.

    A transform that is `by_rows` only moves whole rows, of numbers or of blocks' bytes. With `column_runs` it only
    moves runs of that many columns of a matrix, and moves blocks too if it is told their columns.
    With `stack`, it is that many tensors on top of each other: `{}` in the name is the number of each. Tensors that are
    `also` needed are further arguments of `transform`.
    """

    name: str
    transform: Transform | None = None
    stack: int = 0
    also: tuple[str, ...] = ()
    by_rows: bool = False
    column_runs: int = 0

    @property
    def moves_rows(self) -> bool:
        """Whether rows stay whole on the way, so that they may be packed."""
        return self.transform is None or self.by_rows

    def moves_blocks(self, columns: int) -> bool:
        """Whether GGUF's blocks of that many columns stay whole on the way."""
        return self.moves_rows or (self.column_runs > 0 and self.column_runs % columns == 0)

    def keeps(self, coding: Coding) -> bool:
        """Whether codes survive the way: if rows move, each must have its own scales."""
        return self.transform is None or (self.by_rows and coding.block[0] == 1 and not coding.order)

    @property
    def tensors(self) -> list[str]:
        if self.stack:
            return [self.name.replace("{}", str(i)) for i in range(self.stack)]
        return [self.name, *self.also]

    def renamed(self, rename: Callable[[str], str]) -> Source:
        return replace(self, name=rename(self.name), also=tuple(map(rename, self.also)))


Sources = tuple[Source, ...]  # the parts of a parameter in their order along the axis of its layout

NameMap = dict[str, tuple[Sources, ...]]
"""Parameter path (`layers.3.mlp.down.weight`) -> the ways in which a checkpoint may hold it; the first found counts."""


class AnyOf:
    """Alternative patterns that a checkpoint may follow: split or fused, single or stacked."""

    def __init__(self, *options: str | Source | tuple[str | Source, ...]):
        self.options = options


Pattern = str | Source | tuple[str | Source, ...] | AnyOf


def expand(patterns: dict[str, Pattern], num_layers: int, *, first: int = 0) -> NameMap:
    """Write out a table whose keys and tensor names may hold `*` for the layer's number.

    Tensors are numbered from `first`, and parameters from 0.

    Worked example: `{"layers.*.mlp.down.weight": "blk.*.ffn_down.weight"}` with two layers becomes entries for
    `layers.0.mlp.down.weight` and `layers.1.mlp.down.weight`.
    """
    names: NameMap = {}
    for path, pattern in patterns.items():
        options = [_sources(option) for option in (pattern.options if isinstance(pattern, AnyOf) else (pattern,))]
        for layer in range(num_layers) if "*" in path else (0,):
            names[path.replace("*", str(layer))] = tuple(
                tuple(s.renamed(lambda name: name.replace("*", str(first + layer))) for s in sources)  # noqa: B023
                for sources in options
            )
    return names


def renamed(names: NameMap, rename: Callable[[str], str]) -> NameMap:
    """The same map with other names of tensors."""
    return {
        path: tuple(tuple(source.renamed(rename) for source in sources) for sources in options)
        for path, options in names.items()
    }


def _sources(pattern: str | Source | tuple[str | Source, ...]) -> Sources:
    items = pattern if isinstance(pattern, tuple) else (pattern,)
    return tuple(Source(item) if isinstance(item, str) else item for item in items)


def plus_one(weight: np.ndarray) -> np.ndarray:
    """A norm stored as `w` and applied as `1 + w`."""
    return weight.astype(np.float32) + 1


def without_middle_axis(weight: np.ndarray) -> np.ndarray:
    """A depthwise convolution's taps, `[channels, 1, taps]` or already `[channels, taps]`, as `[channels, taps]`."""
    return weight.reshape(weight.shape[0], -1)


def halves_apart(weight: np.ndarray) -> np.ndarray:
    """Alternating rows of gate and up, of each matrix of a stack, as all of the gate followed by all of up."""
    return np.concatenate([weight[:, ::2], weight[:, 1::2]], axis=1)


def transposed(weight: np.ndarray) -> np.ndarray:
    """Each matrix of a stack, stored `[in, out]`, as `[out, in]`."""
    return weight.swapaxes(-1, -2)


def unpermute_rope(head_dim: int) -> Transform:
    """Undo GGUF's order of rotary rows in llama-family Q and K, where pairs are adjacent; here halves are apart.

    Worked example, head_dim 4: rows `0 2 1 3` (pairs (0, 2) and (1, 3) adjacent) go back to `0 1 2 3`.
    """

    def transform(weight: np.ndarray) -> np.ndarray:
        heads = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
        return heads.swapaxes(1, 2).reshape(weight.shape)

    return transform
