"""A GGUF file, or the parts of a split one, as a Checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import GGUF_FLOATS, Stored
from jaxllm.weights.checkpoint import TensorInfo
from jaxllm.weights.generation import generation_config_of, read_generation_config
from jaxllm.weights.gguf_header import GGUFTensor, read_header
from jaxllm.weights.gguf_parts import check_parts, part_files


class GGUFCheckpoint:
    """Memory-mapped GGUF files; see `Checkpoint`. Names, shapes `[out, in]` and metadata keys are GGUF's own.

    `path` is the file, or any part of a split one; the attribute `path` is the first part, which has the metadata.
    """

    format = "gguf"

    def __init__(self, path: Path):
        files = part_files(path)
        headers = [read_header(file) for file in files]
        check_parts(files, headers)
        self.path = files[0]
        self.config: dict[str, Any] = headers[0].metadata
        beside = generation_config_of(self.path)
        self.generation_config = read_generation_config(beside.parent, beside.name)
        self._places: dict[str, tuple[Path, GGUFTensor]] = {
            name: (file, tensor)
            for file, header in zip(files, headers, strict=True)
            for name, tensor in header.tensors.items()
        }
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, (_, tensor) in self._places.items()}
        self._data: dict[Path, np.ndarray] | None = {file: np.memmap(file, np.uint8, mode="r") for file in files}

    def read(self, name: str) -> Stored:
        """One tensor, a read-only view of its file."""
        if self._data is None:
            raise CheckpointError(f"{self.path}: closed")
        if name not in self._places:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        file, (shape, dtype, offset, nbytes) = self._places[name]
        data = self._data[file][offset : offset + nbytes].view(np.ndarray)
        origin = f"{file}: tensor {name!r}"
        if dtype not in GGUF_FLOATS:
            return Stored(data, dtype, shape, packed=True, origin=origin)
        return Stored(data.view(GGUF_FLOATS[dtype]).reshape(shape), dtype, shape, origin=origin)

    def close(self) -> None:
        """Let go of the maps; arrays already read keep them alive."""
        self._data = None
