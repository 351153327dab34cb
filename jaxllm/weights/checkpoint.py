"""What an opened checkpoint offers, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


class TensorInfo(NamedTuple):
    """Shape as `[out, in]` (NumPy order, outermost first), and the format's own type name (`F32`, `Q4_K`, …)."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """An opened checkpoint: cheap to open, tensors are read one at a time.

    Attributes:
        format: "safetensors" or "gguf".
        path: the directory or file.
        config: the parsed config.json, or the GGUF metadata as plain Python values (large tokenizer arrays left out).
        generation_config: the parsed generation_config.json; empty where there is none.
        tensors: name -> TensorInfo of every tensor stored.
    """

    format: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, or as bfloat16/float16 when stored so. Quantized blocks are dequantized.

        Raises CheckpointError when the file is truncated or the type is unknown.
        """

    def close(self) -> None:
        """Release the files."""
