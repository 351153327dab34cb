"""Matrices that are made of several tensors, which every packing reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Codes, Coding, Stored
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.fields import shown


class Packed(NamedTuple):
    """A matrix as the model sees it, the tensors that it hides, and a function that reads its codes."""

    info: TensorInfo
    tensors: frozenset[str]
    read: Callable[[], Stored]


@dataclass
class Parts:
    """The tensors of the matrix `name`, by what their names add to `prefix`; it notes which were asked for."""

    checkpoint: Checkpoint
    prefix: str
    name: str
    used: set[str] = field(default_factory=set)

    def __contains__(self, suffix: str) -> bool:
        return self.prefix + suffix in self.checkpoint.tensors

    def info(
        self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None, *, rank: int | None = None
    ) -> TensorInfo:
        """A part's header. Raises CheckpointError if the part is missing, or has another type, shape or rank."""
        self.used.add(self.prefix + suffix)
        if suffix not in self:
            raise self.error(f"is missing, which {shown(self.name)} is made of", suffix)
        info = self.checkpoint.tensors[self.prefix + suffix]
        if info.dtype not in dtypes or shape not in (None, info.shape) or rank not in (None, len(info.shape)):
            wanted = f" of shape {shape}" if shape is not None else "" if rank is None else f" with {rank} axes"
            raise self.error(
                f"is {info.dtype} of shape {info.shape}; accepted is {' or '.join(dtypes)}{wanted}", suffix
            )
        return info

    def array(self, suffix: str) -> np.ndarray:
        return self.checkpoint.read(self.prefix + suffix).data

    def ignore(self, *suffixes: str) -> None:
        """Hide parts that may be there and are not needed."""
        self.used |= {self.prefix + suffix for suffix in suffixes if suffix in self}

    def group(self, inputs: int, group_size: int) -> int:
        """Neighbouring inputs that share a scale: all for -1. Raises CheckpointError if they do not divide `inputs`."""
        group = inputs if group_size == -1 else group_size
        if inputs % group:
            raise self.error(f"has {inputs} inputs, which groups of {group} (group_size) do not divide")
        return group

    def error(self, problem: str, suffix: str | None = None) -> CheckpointError:
        name = self.name if suffix is None else self.prefix + suffix
        return CheckpointError(f"{self.checkpoint.path}: tensor {shown(name)} {problem}")

    def packed(
        self, dtype: str, shape: tuple[int, ...], coding: Coding, read: Callable[[], tuple[np.ndarray, Codes]]
    ) -> Packed:
        """The matrix; `dtype` is for people."""
        origin = f"{self.checkpoint.path}: tensor {shown(self.name)}"

        def checked() -> Stored:
            codes, meaning = read()
            scales = [meaning.scale] if meaning.factor is None else [meaning.scale, meaning.factor]
            if not all(np.isfinite(scale.astype(np.float32)).all() for scale in scales):
                raise CheckpointError(f"{origin}: not all of its scales are finite")
            return Stored(codes, dtype, shape, codes=meaning, origin=origin)

        return Packed(TensorInfo(shape, dtype, coding), frozenset(self.used), checked)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes, uint8, in integers `[…, n]`: one after the other without gaps, lowest bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        mask = np.uint8((1 << bits) - 1)
        codes = [data >> shift & mask for shift in range(0, 8, bits)]
        return np.stack(codes, axis=-1).reshape(*data.shape[:-1], -1)
    flat = np.unpackbits(data, axis=-1, bitorder="little")
    flat = flat[..., : flat.shape[-1] // bits * bits].reshape(*data.shape[:-1], -1, bits)
    return np.packbits(flat, axis=-1, bitorder="little")[..., 0]


def sorted_inputs(parts: Parts, suffix: str, inputs: int, groups: int) -> np.ndarray | None:
    """The order of a matrix's inputs by their groups, from each input's group; None if they are in order."""
    if suffix not in parts:
        return None
    parts.info(suffix, ("I32", "I64"), (inputs,))
    group_of = parts.array(suffix)
    if (group_of == -1).all():  # written where nothing was sorted
        return None
    low, high = int(group_of.min(initial=0)), int(group_of.max(initial=0))
    if low < 0 or high >= groups or (np.bincount(group_of, minlength=groups) * groups != inputs).any():
        raise parts.error(f"does not name each of {groups} groups {inputs // groups} times", suffix)
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    return order if (order != np.arange(inputs)).any() else None


def matrices(checkpoint: Checkpoint, suffix: str, weight: str = ".weight") -> list[Parts]:
    """The matrices that have a tensor whose name ends in `suffix`; `weight` ends the names of the matrices."""
    prefixes = [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]
    return [Parts(checkpoint, prefix, prefix + weight) for prefix in prefixes]


def unsupported(method: str, key: str, value: Any, accepted: str) -> CheckpointError:
    return CheckpointError(f"quantization_config.{key} is {shown(value)}, in {method}; accepted is {accepted}")
