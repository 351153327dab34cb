"""What every packing reads: a few tensors that together are one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Codes, Coding, Stored
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.fields import shown

BYTES = 8
"""Bits in one."""


class Packed(NamedTuple):
    """A matrix made of several tensors.

    Attributes:
        info: as what the model sees it.
        tensors: what it is made of, which the model does not see.
        read: its codes. Raises CheckpointError where they make no sense.
    """

    info: TensorInfo
    tensors: frozenset[str]
    read: Callable[[], Stored]


@dataclass
class Parts:
    """The tensors of one matrix, by what their names add to `prefix`; remembers which were asked for.

    Attributes:
        name: of the matrix, for the model and in errors.
    """

    checkpoint: Checkpoint
    prefix: str
    name: str
    used: set[str] = field(default_factory=set)

    def __contains__(self, suffix: str) -> bool:
        return self.prefix + suffix in self.checkpoint.tensors

    def info(self, suffix: str, dtypes: tuple[str, ...], rank: int | None = None) -> TensorInfo:
        """What the header says of a part, which must be of these types. Raises CheckpointError if it is not."""
        info = self._found(suffix)
        if info.dtype not in dtypes or (rank is not None and len(info.shape) != rank):
            of_rank = "" if rank is None else f" with {rank} axes"
            raise self.error(
                f"is {info.dtype} of shape {info.shape}; accepted is {' or '.join(dtypes)}{of_rank}", suffix
            )
        return info

    def expect(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorInfo:
        """A part of these types and one of these shapes. Raises CheckpointError if it is not."""
        info = self._found(suffix)
        if info.dtype not in dtypes or info.shape not in shapes:
            accepted = f"{' or '.join(dtypes)} of shape {' or '.join(map(str, shapes))}"
            raise self.error(f"is {info.dtype} of shape {info.shape}; accepted is {accepted}", suffix)
        return info

    def array(self, suffix: str) -> np.ndarray:
        """The numbers of a part."""
        return self.checkpoint.read(self.prefix + suffix).data

    def ignore(self, *suffixes: str) -> None:
        """Parts that may be there and say nothing of the matrix."""
        self.used |= {self.prefix + suffix for suffix in suffixes if suffix in self}

    def error(self, problem: str, suffix: str | None = None) -> CheckpointError:
        """Of a part, or of the matrix."""
        name = self.name if suffix is None else self.prefix + suffix
        return CheckpointError(f"{self.checkpoint.path}: tensor {shown(name)} {problem}")

    def packed(
        self, dtype: str, shape: tuple[int, ...], coding: Coding, read: Callable[[], tuple[np.ndarray, Codes]]
    ) -> Packed:
        """The matrix; `dtype` is for people."""
        origin = f"{self.checkpoint.path}: tensor {shown(self.name)}"

        def checked() -> Stored:
            codes, meaning = read()
            if not np.isfinite(meaning.scale.astype(np.float32)).all():
                raise CheckpointError(f"{origin}: not all of its scales are finite")
            return Stored(codes, dtype, shape, codes=meaning, origin=origin)

        return Packed(TensorInfo(shape, dtype, coding), frozenset(self.used), checked)

    def _found(self, suffix: str) -> TensorInfo:
        self.used.add(self.prefix + suffix)
        if suffix not in self:
            raise self.error(f"is missing, which {shown(self.name)} is made of", suffix)
        return self.checkpoint.tensors[self.prefix + suffix]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes, uint8, in integers `[…, n]`: one after the other without gaps, lowest bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == BYTES:
        return data
    if BYTES % bits == 0:
        mask = np.uint8((1 << bits) - 1)
        codes = [data >> shift & mask for shift in range(0, BYTES, bits)]
        return np.stack(codes, axis=-1).reshape(*data.shape[:-1], -1)
    flat = np.unpackbits(data, axis=-1, bitorder="little")
    flat = flat[..., : flat.shape[-1] // bits * bits].reshape(*data.shape[:-1], -1, bits)
    return np.packbits(flat, axis=-1, bitorder="little")[..., 0]


def sorted_inputs(parts: Parts, suffix: str, inputs: int, groups: int) -> np.ndarray | None:
    """The inputs group by group, of a matrix with a tensor of each input's group; None where they lie so.

    It is read at once, since it decides what the weight becomes.
    """
    if suffix not in parts:
        return None
    parts.expect(suffix, ("I32", "I64"), (inputs,))
    group_of = parts.array(suffix)
    if (group_of == -1).all():  # written where nothing was sorted
        return None
    low, high = int(group_of.min(initial=0)), int(group_of.max(initial=0))
    if low < 0 or high >= groups or (np.bincount(group_of, minlength=groups) * groups != inputs).any():
        raise parts.error(f"does not name each of {groups} groups {inputs // groups} times", suffix)
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    return order if (order != np.arange(inputs)).any() else None


def modules(checkpoint: Checkpoint, suffix: str) -> list[str]:
    """What stands before `suffix` in the names of tensors."""
    return [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]


def unsupported(method: str, key: str, value: Any, accepted: str) -> CheckpointError:
    """A variant of a method that is not read."""
    return CheckpointError(f"quantization_config.{key} is {shown(value)}, in {method}; accepted is {accepted}")
