"""A Hugging Face directory of safetensors files as a Checkpoint.

The format is read here and not by the safetensors package, because that cannot give FP8 to NumPy.
Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import Stored
from jaxllm.weights import fields, folder
from jaxllm.weights.checkpoint import ByteRange, MappedCheckpoint, TensorInfo
from jaxllm.weights.fields import MAX_RANK, MAX_SIZE, check_apart, check_fields, is_storable, shown

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_MAX_HEADER = 100_000_000
_SIZE = fields.whole(0, MAX_SIZE)
_ENTRY_FIELDS = {
    "dtype": fields.one_of(*_DTYPES),
    "shape": fields.many(_SIZE, MAX_RANK),
    "data_offsets": fields.several(_SIZE, 2),
}
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(MappedCheckpoint):
    """A directory with config.json and, unless `weights` is False, safetensors files, whole or sharded."""

    format = "safetensors"

    def __init__(self, path: Path, *, weights: bool = True):
        super().__init__()
        self.path = path
        self.config = folder.read_object(path, "config.json")
        self.generation_config = folder.read_generation_config(path)
        self.tensors = {}
        for file in _weight_files(path):
            self._add_file(file)
        for module in folder.sentence_modules(path) if weights else ():
            if module.kind == "Dense":
                self._add_file(folder.model_file(path, module.weights), f"{module.folder}.")
        if weights and not self.tensors:
            held = f", but {', '.join(found[:3])}: {folder.NO_PICKLES}" if (found := folder.pickles(path)) else ""
            raise CheckpointError(f"{path}: holds no *.safetensors file{held}")

    def _add_file(self, file: Path, before: str = "") -> None:
        for name, info, place in _read_header(file):
            name = before + name
            if name in self.tensors:
                raise CheckpointError(f"{file}: tensor {shown(name)} is also in {self.places[name].file.name}")
            self.tensors[name], self.places[name] = info, place

    def read(self, name: str) -> Stored:
        data = self.bytes_of(name)
        shape, dtype, _ = self.tensors[name]
        origin = f"{self.path}: tensor {shown(name)}"
        return Stored(data.view(_DTYPES[dtype]).reshape(shape), dtype, shape, origin=origin)


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of one safetensors file by its name, copied into memory. Raises CheckpointError if it is corrupt."""
    folder.check_no_device(file)
    places = _read_header(file)
    data = np.memmap(file, np.uint8, mode="r")
    return {
        name: data[offset : offset + nbytes].view(np.ndarray).view(_DTYPES[info.dtype]).reshape(info.shape).copy()
        for name, info, (_, offset, nbytes) in places
    }


def _weight_files(path: Path) -> list[Path]:
    """model.safetensors alone, as transformers has it; else the index's shards, else every *.safetensors file."""
    single = folder.model_file(path, "model.safetensors")
    if single.is_file():
        return [single]
    if index := _index(path):
        files = [folder.model_file(path, name) for name in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{path / _INDEX}: names shard {file.name}, which is missing")
        return files
    return [folder.model_file(path, file.name) for file in sorted(path.glob("*.safetensors"))]


def _index(path: Path) -> dict[str, str]:
    if not folder.model_file(path, _INDEX).exists():
        return {}
    weight_map = folder.read_object(path, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / _INDEX}: weight_map is missing or not a map of tensor name to file name")
    for name, file in weight_map.items():
        if file in ("", ".", "..") or not file.isprintable() or set(file) & set("/\\") or len(file) > 200:
            raise CheckpointError(
                f"{path / _INDEX}: weight_map has {shown(name)} in {shown(file)}; accepted are names of files beside it"
            )
    return weight_map


def _read_header(file: Path) -> list[tuple[str, TensorInfo, ByteRange]]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file}: truncated or not safetensors: a header of {length:,} bytes in {size:,}")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: corrupt safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt safetensors header: it is no object")
    metadata = header.pop("__metadata__", None)
    found = [_entry(file, size, 8 + length, name, entry) for name, entry in header.items()]
    check_apart(file, ((place.offset, place.nbytes, name) for name, _, place in found))
    named = {name: (info, place) for name, info, place in found}
    aliases = metadata.items() if isinstance(metadata, dict) else ()  # as safetensors' save_model writes tied tensors
    return found + [
        (alias, *named[name])
        for alias, name in aliases
        if isinstance(name, str) and name in named and alias not in named
    ]


def _entry(file: Path, size: int, start: int, name: str, entry: Any) -> tuple[str, TensorInfo, ByteRange]:
    here = f"{file}: tensor {shown(name)}"
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY_FIELDS.keys():
        raise CheckpointError(f"{here}: corrupt safetensors header: accepted are dtype, shape and data_offsets")
    check_fields(entry, _ENTRY_FIELDS, f"{here}: ")
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not is_storable(shape) or end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise CheckpointError(f"{here}: {end - begin:,} bytes are no {dtype} of shape {shape}")
    if start + end > size:
        raise CheckpointError(f"{here}: truncated: it ends at byte {start + end:,} of a file of {size:,}")
    return name, TensorInfo(shape, dtype), ByteRange(file, start + begin, end - begin)
