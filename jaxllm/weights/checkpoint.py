"""What an opened checkpoint offers, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxllm.quantization.stored import Stored


class TensorInfo(NamedTuple):
    """Shape as `[out, in]` (NumPy order, outermost first), and the format's own type name (`F32`, `Q4_K`, …)."""

    shape: tuple[int, ...]
    dtype: str


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
