"""Opened checkpoints, whatever their format: in files, in arrays, or with adapters in their tensors."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Coding, Stored
from jaxllm.weights.fields import shown


class TensorInfo(NamedTuple):
    """A tensor as its file's header describes it.

    Attributes:
        shape: as `[out, in]` (NumPy order, outermost first).
        dtype: the format's own name of the type: `F32`, `Q4_K`, `GPTQ 4-bit`, …
        coding: of a matrix that is stored as codes for its numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    coding: Coding | None = None


class Checkpoint:
    """An opened checkpoint: cheap to open, tensors are read one at a time.

    Attributes:
        format: "safetensors", "gguf", "orbax" or "arrays".
        path: the directory or file.
        config: the parsed config.json, or the GGUF metadata as plain Python values (large tokenizer arrays left out),
            or the manifest of what `jaxllm convert` saved.
        generation_config: the parsed generation_config.json; empty where there is none.
        tensors: name -> TensorInfo of every tensor stored.
        overrides: other values for keys of the config.json that a GGUF's metadata are read as.
        zero_biases: biases of quantized matrices that are all zero. AutoGPTQ writes them for layers that have none, so
            a model need not use them.
    """

    format: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    zero_biases: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = {}

    def read(self, name: str) -> Stored:
        """One tensor as it is stored, not expanded. Raises CheckpointError if there is none, or the file is closed."""
        raise NotImplementedError

    def release(self, names: Iterable[str]) -> None:
        """These tensors have been read: what of them is mapped need not count as this process's memory."""

    def close(self) -> None:
        """Release the files; arrays already read keep theirs alive."""


class ByteRange(NamedTuple):
    """The bytes of a tensor."""

    file: Path
    offset: int
    nbytes: int


class MappedCheckpoint(Checkpoint):
    """Tensors in files that are mapped into memory."""

    def __init__(self) -> None:
        self.places: dict[str, ByteRange] = {}
        self._maps: dict[Path, np.ndarray] | None = {}

    def map(self, file: Path) -> np.ndarray:
        if self._maps is None:
            raise CheckpointError(f"{self.path}: closed")
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, mode="r")
        return self._maps[file]

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of a tensor, a read-only view of its file. Raises CheckpointError as `read`."""
        if name not in self.places:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        file, offset, nbytes = self.places[name]
        return self.map(file)[offset : offset + nbytes].view(np.ndarray)

    def release(self, names: Iterable[str]) -> None:
        for file, offset, nbytes in (self.places[name] for name in names if name in self.places):
            first, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end and hasattr(mmap, "MADV_DONTNEED"):  # a page that is read again is mapped again
                self.map(file)._mmap.madvise(mmap.MADV_DONTNEED, first, end - first)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._maps = None


class ArrayCheckpoint(Checkpoint):
    """A Checkpoint of arrays by name: NumPy's, JAX's, or of any library that exports them by DLPack."""

    format = "arrays"
    path = Path("the given arrays")

    def __init__(self, arrays: Mapping[str, Any]):
        """Raises CheckpointError where one of them is no array of floats."""
        self.config, self.generation_config = {}, {}
        self.arrays = {name: _array(name, value) for name, value in arrays.items()}
        self.tensors = {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name: str) -> Stored:
        """A copy in host memory: the caller may overwrite its own."""
        array = self.arrays[name]
        return Stored(np.array(array), str(array.dtype), array.shape, origin=f"array {name!r}")


def _array(name: str, value: Any) -> np.ndarray | jax.Array:
    if not isinstance(value, np.ndarray | jax.Array):
        if not hasattr(value, "__dlpack__"):
            raise CheckpointError(f"{name!r} is of type {type(value).__name__}; it must be an array")
        value = jnp.from_dlpack(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise CheckpointError(f"{name!r} has numbers of type {value.dtype}; they must be floats")
    return value


class WrappedCheckpoint(Checkpoint):
    """Another checkpoint, from which it differs in some tensors."""

    def __init__(self, base: Checkpoint):
        self._base = base
        self.format, self.path, self.config = base.format, base.path, base.config
        self.generation_config, self.tensors, self.zero_biases = base.generation_config, base.tensors, base.zero_biases

    def release(self, names: Iterable[str]) -> None:
        self._base.release(names)

    def close(self) -> None:
        self._base.close()


Edit = Callable[[np.ndarray], np.ndarray]  # a tensor as float32 -> the tensor that replaces it


class MergedCheckpoint(WrappedCheckpoint):
    """A checkpoint with tensors (`edited`) that are edited when they are read, and are float32 then."""

    def __init__(
        self, base: Checkpoint, edits: Mapping[str, Sequence[Edit]], copies: Mapping[str, str], config: dict[str, Any]
    ):
        """`copies` are tensors that the base does not have -> those of the base that they begin as."""
        super().__init__(base)
        self.edited = frozenset(edits)
        self.config = config
        self._edits, self._copies = edits, copies
        self.tensors = dict(base.tensors) | {name: base.tensors[copied] for name, copied in copies.items()}
        self.tensors |= {name: TensorInfo(self.tensors[name].shape, "F32") for name in edits}

    def stored_type(self, name: str) -> str:
        return self._base.tensors[self._copies.get(name, name)].dtype

    def read(self, name: str) -> Stored:
        stored = self._base.read(self._copies.get(name, name))
        if name not in self._edits:
            return stored
        values = np.asarray(stored.expand(), np.float32)
        for edit in self._edits[name]:
            values = edit(values)
        return Stored(values, "F32", values.shape, origin=stored.origin)
