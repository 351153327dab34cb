"""A GGUF file as a Checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import GGUF_FLOATS, Stored
from jaxllm.weights.checkpoint import TensorInfo
from jaxllm.weights.generation import generation_config_of, read_generation_config
from jaxllm.weights.gguf_header import read_header


class GGUFCheckpoint:
    """A memory-mapped GGUF file; see `Checkpoint`. Names, shapes `[out, in]` and metadata keys are GGUF's own."""

    format = "gguf"

    def __init__(self, path: Path):
        header = read_header(path)
        parts = header.metadata.get("split.count", 1)
        if parts > 1:
            raise CheckpointError(
                f"{path}: one of {parts} parts of a split GGUF; join them first with `llama-gguf-split --merge`"
            )
        self.path = path
        self.config: dict[str, Any] = header.metadata
        beside = generation_config_of(path)
        self.generation_config = read_generation_config(beside.parent, beside.name)
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in header.tensors.items()}
        self._places = header.tensors
        self._data: np.ndarray | None = np.memmap(path, np.uint8, mode="r")

    def read(self, name: str) -> Stored:
        """One tensor, a read-only view of the file."""
        if self._data is None:
            raise CheckpointError(f"{self.path}: closed")
        if name not in self._places:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        shape, dtype, offset, nbytes = self._places[name]
        data = self._data[offset : offset + nbytes].view(np.ndarray)
        origin = f"{self.path}: tensor {name!r}"
        if dtype not in GGUF_FLOATS:
            return Stored(data, dtype, shape, packed=True, origin=origin)
        return Stored(data.view(GGUF_FLOATS[dtype]).reshape(shape), dtype, shape, origin=origin)

    def close(self) -> None:
        """Let go of the map; arrays already read keep it alive."""
        self._data = None
