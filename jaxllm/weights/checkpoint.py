"""What an opened checkpoint offers, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
