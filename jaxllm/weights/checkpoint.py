"""What an opened checkpoint offers, whatever its format; of arrays in memory too, and with adapters in its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Coding, Stored


class TensorInfo(NamedTuple):
    """What a header says of a tensor.

    Attributes:
        shape: as `[out, in]` (NumPy order, outermost first).
        dtype: the format's own name of the type: `F32`, `Q4_K`, `GPTQ 4-bit`, …
        coding: of a matrix that is stored as codes for its numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    coding: Coding | None = None


@runtime_checkable
class Checkpoint(Protocol):
    """An opened checkpoint: cheap to open, tensors are read one at a time.

    Attributes:
        format: "safetensors", "gguf" or "orbax".
        path: the directory or file.
        config: the parsed config.json, or the GGUF metadata as plain Python values (large tokenizer arrays left out),
            or the manifest of what `jaxllm convert` saved.
        generation_config: the parsed generation_config.json; empty where there is none.
        tensors: name -> TensorInfo of every tensor stored.
    """

    format: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Stored:
        """One tensor as it is stored: a view of the file. To expand it, or not, is the caller's decision.

        Raises CheckpointError when there is no such tensor, or the file is closed.
        """

    def close(self) -> None:
        """Release the files."""


class ArrayCheckpoint:
    """A Checkpoint of arrays by name: NumPy's, JAX's, or of any library that exports them by DLPack."""

    format = "arrays"

    def __init__(self, arrays: Mapping[str, Any]):
        """Raises CheckpointError where one of them is no array of floats."""
        self.path = Path("the given arrays")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.arrays = {name: _array(name, value) for name, value in arrays.items()}
        self.tensors = {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name: str) -> Stored:
        """A copy in host memory: the caller may overwrite its own."""
        array = self.arrays[name]
        return Stored(np.array(array), str(array.dtype), array.shape, origin=f"array {name!r}")

    def close(self) -> None:
        """Let go of the arrays."""
        self.arrays = {}


def _array(name: str, value: Any) -> np.ndarray | jax.Array:
    if not isinstance(value, np.ndarray | jax.Array):
        if not hasattr(value, "__dlpack__"):
            raise CheckpointError(f"{name!r} is of type {type(value).__name__}; it must be an array")
        value = jnp.from_dlpack(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise CheckpointError(f"{name!r} has numbers of type {value.dtype}; they must be floats")
    return value


Edit = Callable[[np.ndarray], np.ndarray]
"""A tensor as float32 -> what it becomes."""


class MergedCheckpoint:
    """A checkpoint some of whose tensors are edited when they are read, and are float32 then; see `Checkpoint`.

    Attributes:
        edited: the names of those tensors.
        zero_biases: see `PackedCheckpoint`.
    """

    def __init__(
        self,
        base: Checkpoint,
        edits: Mapping[str, Sequence[Edit]],
        copies: Mapping[str, str],
        config: dict[str, Any],
    ):
        """`copies` are tensors that the base does not have, and those of it that they begin as."""
        self._base = base
        self.edited = frozenset(edits)
        self.format, self.path, self.generation_config = base.format, base.path, base.generation_config
        self.config = config
        self.zero_biases: tuple[str, ...] = getattr(base, "zero_biases", ())
        self._edits, self._copies = edits, copies
        self.tensors = dict(base.tensors) | {name: base.tensors[copied] for name, copied in copies.items()}
        self.tensors |= {name: TensorInfo(self.tensors[name].shape, "F32") for name in edits}

    def stored_type(self, name: str) -> str:
        """The type that the base has a tensor in."""
        return self._base.tensors[self._copies.get(name, name)].dtype

    def read(self, name: str) -> Stored:
        """One tensor: as the base has it, or float32 where it is edited."""
        stored = self._base.read(self._copies.get(name, name))
        if name not in self._edits:
            return stored
        values = np.asarray(stored.expand(), np.float32)
        for edit in self._edits[name]:
            values = edit(values)
        return Stored(values, "F32", values.shape, origin=stored.origin)

    def close(self) -> None:
        """Release the files."""
        self._base.close()
