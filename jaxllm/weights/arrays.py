"""Arrays in memory, read as a checkpoint's tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import TensorInfo


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
