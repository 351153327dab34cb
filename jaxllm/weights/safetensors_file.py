"""A Hugging Face directory of safetensors files as a Checkpoint.

The format is read here and not by the safetensors package, because that cannot give FP8 to NumPy.
Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights.checkpoint import TensorInfo

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_MAX_HEADER = 100_000_000
_INDEX = "model.safetensors.index.json"


class _Place(NamedTuple):
    file: Path
    offset: int
    nbytes: int


class SafetensorsCheckpoint:
    """A directory with config.json and safetensors files, whole or sharded; see `Checkpoint`.

    FP8 tensors come with their scales where they have one a block. With `weights=False` only config.json must be there.
    """

    format = "safetensors"

    def __init__(self, path: Path, *, weights: bool = True):
        self.path = path
        self.config: dict[str, Any] = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config: dict[str, Any] = _read_json(generation) if generation.exists() else {}
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        self._maps: dict[Path, np.ndarray] | None = {}
        for file in _weight_files(path):
            self._add_file(file)
        if weights and not self.tensors:
            raise CheckpointError(f"{path}: holds no *.safetensors file")
        self._check_index()

    def _add_file(self, file: Path) -> None:
        for name, info, place in _read_header(file):
            if name in self.tensors:
                raise CheckpointError(f"{file}: tensor {name!r} is also in {self._places[name].file.name}")
            self.tensors[name], self._places[name] = info, place

    def _check_index(self) -> None:
        for name, file in _index(self.path).items():
            if name not in self._places or self._places[name].file.name != file:
                raise CheckpointError(f"{self.path / _INDEX}: names tensor {name!r} in {file}, which does not hold it")

    def read(self, name: str) -> Stored:
        """One tensor, a read-only view of the file."""
        if self._maps is None:
            raise CheckpointError(f"{self.path}: closed")
        if name not in self._places:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        file, offset, nbytes = self._places[name]
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, mode="r")
        shape, dtype = self.tensors[name]
        tensor = self._maps[file][offset : offset + nbytes].view(np.ndarray).view(_DTYPES[dtype]).reshape(shape)
        block = self.config.get("quantization_config", {}).get("weight_block_size")
        if block and dtype == "F8_E4M3":
            scale = self.read(f"{name}_scale_inv").data
            return Stored(tensor, dtype, shape, scale=scale, scale_block=tuple(block))
        return Stored(tensor, dtype, shape)

    def close(self) -> None:
        """Let go of the maps; arrays already read keep theirs alive."""
        self._maps = None


def _weight_files(path: Path) -> list[Path]:
    """The index's shards; else model.safetensors alone, else every *.safetensors file."""
    if index := _index(path):
        files = [path / name for name in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{path / _INDEX}: names shard {file.name}, which is missing")
        return files
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def _index(path: Path) -> dict[str, str]:
    index = path / _INDEX
    if not index.exists():
        return {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is missing or not a map of tensor name to file name")
    return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def _read_header(file: Path) -> list[tuple[str, TensorInfo, _Place]]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file}: truncated or not safetensors: a header of {length:,} bytes in {size:,}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file}: corrupt safetensors header: {error}") from None
    return [_checked(file, size, 8 + length, *entry) for entry in entries]


def _checked(
    file: Path, size: int, start: int, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int
) -> tuple[str, TensorInfo, _Place]:
    if dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has unknown dtype {dtype!r}; known are {', '.join(_DTYPES)}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{file}: tensor {name!r} has shape {shape} at bytes {begin} to {end}")
    if end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise CheckpointError(f"{file}: tensor {name!r}: {end - begin:,} bytes are no {dtype} of shape {shape}")
    if start + end > size:
        raise CheckpointError(f"{file}: truncated: tensor {name!r} ends at byte {start + end:,} of a file of {size:,}")
    return name, TensorInfo(shape, dtype), _Place(file, start + begin, end - begin)
