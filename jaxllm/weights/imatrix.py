"""llama.cpp's importance matrices: how much each input of a product matters, measured on a text.

Two forms: GGUF files with sums and counts, and the older `.dat` files (tools/imatrix/imatrix.cpp,
https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.folder import check_no_device
from jaxllm.weights.gguf_file import GGUFCheckpoint

Importance = Float32[np.ndarray, "*experts i"]
"""The mean square of each input; of experts that saw no token it is 1 everywhere."""

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_NAME = 1024
MAX_ENTRIES = 2**20


def read_imatrix(path: Path) -> dict[str, Importance]:
    """Importance by the name that GGUF has for the weight; `[experts, i]` where a file has several matrices in one.

    Raises:
        CheckpointError: no such file, or it is of neither form, or truncated, or has numbers below 0.
    """
    check_no_device(path)
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            found = _read_gguf(path) if is_gguf else _read_dat(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"imatrix {path}: {error.strerror or error}") from None
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise CheckpointError(f"imatrix {path}: {shown(name)} has numbers that are no mean squares")
    if not found:
        raise CheckpointError(f"imatrix {path}: holds no entries")
    return found


def _read_gguf(path: Path) -> dict[str, Importance]:
    file = GGUFCheckpoint(path)
    found = {}
    for name in (name for name in file.tensors if name.endswith(SUMS)):
        weight = name.removesuffix(SUMS)
        if weight + COUNTS not in file.tensors:
            raise CheckpointError(f"imatrix {path}: has {shown(name)}, but no {shown(weight + COUNTS)}")
        sums, counts = (np.asarray(file.read(n).expand(), np.float32) for n in (name, weight + COUNTS))
        found[weight] = _means(path, weight, sums.reshape(-1, sums.shape[-1]), counts.reshape(-1, 1))
    return found


def _read_dat(path: Path, data: bytes) -> dict[str, Importance]:
    """Of each entry: length and text of its name, calls, number of values, and their means times the calls."""
    place, found = 0, {}

    def number() -> int:
        nonlocal place
        (value,) = struct.unpack_from("<i", data, place)
        place += 4
        return value

    try:
        entries = number()
        if not 0 < entries <= MAX_ENTRIES:
            raise CheckpointError(f"imatrix {path}: is neither a GGUF file nor an older .dat file of llama.cpp's")
        for _ in range(entries):
            length = number()
            if not 0 < length <= MAX_NAME:
                raise CheckpointError(f"imatrix {path}: a name of {length:,} bytes; it is no .dat file of llama.cpp's")
            name = data[place : place + length].decode("utf-8")
            place += length
            calls, count = number(), number()
            if count < 1:
                raise CheckpointError(f"imatrix {path}: {shown(name)} has {count:,} values")
            values = np.frombuffer(data, "<f4", count, place)
            place += values.nbytes
            found[name] = values / np.float32(max(calls, 1))
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"imatrix {path}: truncated or corrupt: {error}") from None
    return found


def _means(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> Importance:
    if len(sums) != len(counts):
        raise CheckpointError(f"imatrix {path}: {shown(name)} has {len(sums)} rows of sums and {len(counts)} counts")
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
    return means[0] if len(means) == 1 else means


class WeighedCheckpoint:
    """A checkpoint whose tensors come with their importance, by its own names for them; see `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, importance: Mapping[str, Importance]):
        self.format, self.path, self.tensors = checkpoint.format, checkpoint.path, checkpoint.tensors
        self.config, self.generation_config = checkpoint.config, checkpoint.generation_config
        self._checkpoint, self._importance = checkpoint, importance

    def read(self, name: str) -> Stored:
        """One tensor; its importance is `[i]`, or `[experts, i]`."""
        stored = self._checkpoint.read(name)
        found = self._importance.get(name)
        if found is None:
            return stored
        wanted = stored.shape[-1:] if len(stored.shape) < 3 else (stored.shape[0], stored.shape[-1])
        if found.size != np.prod(wanted):
            raise CheckpointError(f"{stored.origin}: the imatrix has {found.size:,} values for it; expected {wanted}")
        return stored._replace(importance=found.reshape(wanted))

    def close(self) -> None:
        """Release the files."""
        self._checkpoint.close()
