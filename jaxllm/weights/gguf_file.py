"""GGUF files, whole or split, as a Checkpoint; the head of a file; and llama.cpp's importance matrices.

gguf.GGUFReader makes a NumPy view of every array element, which takes 20 s for a 262,144-token vocabulary; the parser
here takes a tenth of a second. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

An importance matrix says how much each input of a product matters, measured on a text. There are two forms: GGUF files
with sums and counts, and the older `.dat` files (tools/imatrix/imatrix.cpp, https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxllm.errors import CheckpointError
from jaxllm.quantization.stored import FLOATS, FP8, NVFP4, Codes, Stored, unpacked
from jaxllm.weights.checkpoint import ByteRange, Checkpoint, MappedCheckpoint, TensorInfo, WrappedCheckpoint
from jaxllm.weights.fields import MAX_RANK, TEXT, check_apart, check_fields, is_storable, shown, whole
from jaxllm.weights.folder import (
    SAMPLING_FIELDS,
    check_no_device,
    generation_config_of,
    part_files,
    read_generation_config,
)


class GGUFCheckpoint(MappedCheckpoint):
    """Memory-mapped GGUF files. Names, shapes `[out, in]` and metadata keys are GGUF's own.

    `path` is the file, or any part of a split one; the attribute `path` is the first part, which has the metadata.
    """

    format = "gguf"

    def __init__(self, path: Path):
        super().__init__()
        files = part_files(path)
        headers = [read_header(file) for file in files]
        _check_parts(files, headers)
        self.path = files[0]
        self.config = headers[0].metadata
        beside = generation_config_of(self.path)
        self.generation_config = _sampling(self.path, self.config) | read_generation_config(beside.parent, beside.name)
        self.tensors = {}
        for file, header in zip(files, headers, strict=True):
            self.map(file)
            for name, (shape, dtype, offset, nbytes) in header.tensors.items():
                coding = NVFP4 if dtype == "NVFP4" and len(shape) > 1 else None
                self.tensors[name], self.places[name] = (
                    TensorInfo(shape, dtype, coding),
                    ByteRange(file, offset, nbytes),
                )
        self._factors: dict[
            str, str
        ] = {}  # of matrices of NVFP4; of their inputs as well, which are measured and unused
        for name in [name for name, info in self.tensors.items() if info.coding == NVFP4]:
            module = name.removesuffix(".weight")
            self.tensors.pop(f"{module}.input_scale", None)
            if factor := self.tensors.pop(f"{module}.scale", None):
                self._factors[name] = f"{module}.scale"
                if factor.dtype != "F32" or factor.shape not in ((1,), self.tensors[name].shape[:-2]):
                    raise CheckpointError(
                        f"{self.path}: tensor {shown(self._factors[name])} is {factor.dtype} of shape {factor.shape}; "
                        "accepted is F32 of shape (1,), or of experts one for each"
                    )

    def read(self, name: str) -> Stored:
        data = self.bytes_of(name)
        shape, dtype, coding = self.tensors[name]
        origin = f"{self.places[name].file}: tensor {name!r}"
        if coding == NVFP4:
            factor = self.bytes_of(self._factors[name]).view(np.float32) if name in self._factors else np.ones(1)
            return _nvfp4(data, shape, factor, origin)
        if dtype not in FLOATS:
            return Stored(data, dtype, shape, packed=True, origin=origin)
        return Stored(data.view(FLOATS[dtype]).reshape(shape), dtype, shape, origin=origin)


def _nvfp4(data: np.ndarray, shape: tuple[int, ...], factor: np.ndarray, origin: str) -> Stored:
    """Blocks of 64 numbers: the scales of each 16, which have no sign, and each 16's codes, eight in low nibbles first.

    A scale of 127 counts as zero, as in llama.cpp.
    """
    blocks = data.reshape(*shape[:-1], shape[-1] // 64, 36)
    scale = blocks[..., :4] & np.uint8(0x7F)
    scale = np.where(scale == 0x7F, np.uint8(0), scale).reshape(*shape[:-1], shape[-1] // 16).view(FP8)
    codes = unpacked(blocks[..., 4:].reshape(*scale.shape, 8), 4).reshape(shape)
    if not np.isfinite(factor).all():
        raise CheckpointError(f"{origin}: its scale is not finite")
    factor = np.broadcast_to(factor.astype(np.float32)[:, None], (*(shape[:-2] or (1,)), shape[-2]))
    factor = factor.reshape(shape[:-1])
    return Stored(codes, "NVFP4", shape, codes=Codes(NVFP4, scale, factor=factor), origin=origin)


_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty", "penalty_last_n": "repeat_last_n",
}  # fmt: skip
"""Of llama.cpp's general.sampling.* those that requests here have too -> their names in a generation_config.json."""


def _sampling(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that the file recommends. Raises CheckpointError for a value that cannot be used."""
    keys = {f"general.sampling.{key}": name for key, name in _SAMPLING.items()}
    check_fields(metadata, {key: SAMPLING_FIELDS[name] for key, name in keys.items()}, f"{path}: ")
    given = {name: metadata[key] for key, name in keys.items() if key in metadata}
    return {name: float(f"{x:.7g}") if isinstance(x, float) else x for name, x in given.items()}  # a float32's digits


def _check_parts(files: Sequence[Path], headers: Sequence[GGUFHeader]) -> None:
    """Raises CheckpointError for files that are not the parts of one model, all of them and in order."""
    tensors = [name for header in headers for name in header.tensors]
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        count = header.metadata.get("split.count", 1)
        if count > 1 and len(files) == 1:
            raise CheckpointError(
                f"{file}: one of {count} parts of a split GGUF, which must keep the name that gguf-split gave it: "
                f"NAME-00001-of-{count:05}.gguf"
            )
        if len(files) == 1:
            return
        # Each part has its number, from 0, the number of parts, and the number of tensors in all of them.
        expected = {"split.count": len(files), "split.no": number, "split.tensors.count": stated}
        for key, value in expected.items():
            if (found := header.metadata.get(key)) != value:
                stated = "missing" if found is None else found
                raise CheckpointError(f"{file}: {key} is {stated}; {value} is expected: it is no part of this model")
    if stated != len(tensors):
        raise CheckpointError(
            f"{files[0]}: split.tensors.count is {stated}, but its {len(files)} parts have {len(tensors)} tensors: "
            "they are parts of several models"
        )
    twice = [name for name, times in Counter(tensors).items() if times > 1]
    if twice:
        raise CheckpointError(f"{files[0]}: tensor {twice[0]!r} is in several parts: they are parts of several models")


VOCABULARY_ARRAYS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "merges", "token_type"))

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_GENERAL_FIELDS = {
    "general.architecture": TEXT, "general.alignment": whole(1, 2**30), "split.count": whole(0, 2**16 - 1),
    "split.no": whole(0, 2**16 - 1), "split.tensors.count": whole(0, 2**31 - 1),
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """Shape in NumPy order (outermost first), GGML type name, and the place of the bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class GGUFHeader(NamedTuple):
    """Metadata as plain Python values, the tensor table, and a SHA-256 over every metadata byte."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    digest: str


def read_header(path: Path, *, skip: Container[str] = VOCABULARY_ARRAYS) -> GGUFHeader:
    """Parse a GGUF file's head, without the metadata in `skip`. Raises CheckpointError if it is none, or damaged."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: the file is empty")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header(skip)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: corrupt GGUF header: {error.reason} in a string") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as GGUF: {error}") from None
    except (struct.error, OverflowError):
        raise CheckpointError(f"{path}: truncated or corrupt GGUF header") from None


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.position = 0

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def header(self, skip: Container[str]) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise self.error(f"not a GGUF file: it begins with {bytes(self.data[:4])!r}, not b'GGUF'")
        self.position = 4
        version = self.unpack("<I")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version}; versions 2 and 3 (little-endian) are read")
        tensor_count, pair_count = self.unpack("<Q"), self.unpack("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string()
            value = self.value(self.unpack("<I"), wanted=key not in skip)
            if key not in skip:
                metadata[key] = value
        digest = hashlib.sha256(memoryview(self.data)[: self.position]).hexdigest()
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        check_fields(metadata, _GENERAL_FIELDS, f"{self.path}: ")
        alignment = metadata.get("general.alignment", 32)
        if alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}; a power of two is expected")
        data_start = -(-self.position // alignment) * alignment
        return GGUFHeader(metadata, self.place(entries, data_start), digest)

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int) -> dict[str, GGUFTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in entries:
            here = f"tensor {shown(name)}"
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise self.error(f"{here} has unknown GGML type {type_id}") from None
            if name in tensors:
                raise self.error(f"{here} is listed twice")
            if not shape or not is_storable(shape):
                raise self.error(f"{here} claims the shape {shape}")
            elements, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % elements:
                raise self.error(f"{kind.name} {here} has rows of {shape[-1]}, no multiple of {elements}")
            tensor = GGUFTensor(shape, kind.name, data_start + offset, math.prod(shape) // elements * block_bytes)
            end, size = tensor.offset + tensor.nbytes, len(self.data)
            if end > size:
                raise self.error(f"truncated: {here} ends at byte {end:,} of a file of {size:,}")
            tensors[name] = tensor
        check_apart(self.path, ((tensor.offset, tensor.nbytes, name) for name, tensor in tensors.items()))
        return tensors

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.unpack("<I")
        if rank > MAX_RANK:
            raise self.error(f"tensor {shown(name)} claims {rank} dimensions")
        dims = tuple(self.unpack("<Q") for _ in range(rank))
        return name, dims[::-1], self.unpack("<I"), self.unpack("<Q")

    def unpack(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        return str(self.take(self.unpack("<Q")), "utf-8")

    def take(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise self.error("truncated or corrupt GGUF header")
        return self.data[start : self.position]

    def value(self, kind: int, wanted: bool) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.unpack("<I"), self.unpack("<Q"), wanted)
        if kind not in _SCALARS:
            raise self.error(f"metadata value of unknown type {kind}")
        return self.unpack(_SCALARS[kind])

    def array(self, kind: int, length: int, wanted: bool) -> list[Any] | None:
        if kind == _STRING:
            return self.strings(length, wanted)
        if kind not in _SCALARS:
            raise self.error(f"metadata array of unsupported element type {kind}")
        width = struct.calcsize(_SCALARS[kind])
        raw = self.take(length * width)
        return list(struct.unpack(f"<{length}{_SCALARS[kind][1]}", raw)) if wanted else None

    def strings(self, length: int, wanted: bool) -> list[str] | None:
        read_length, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
        spans = []
        for _ in range(length):
            (size,) = read_length(data, position)
            position += 8 + size
            if wanted:
                spans.append((position - size, position))
        self.position = position
        return [str(data[start:stop], "utf-8") for start, stop in spans] if wanted else None


Importance = Float32[np.ndarray, "*experts i"]  # mean square of each input; 1 for experts that saw no token

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_NAME = 1024
MAX_ENTRIES = 2**20


def read_imatrix(path: Path) -> dict[str, Importance]:
    """Importance by GGUF's name of the weight; `[experts, i]` where a file has several matrices in one.

    Raises CheckpointError if there is no such file, or it is of neither form, or truncated, or has numbers below 0.
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
    for name in [name for name in file.tensors if name.endswith(SUMS)]:
        weight = name.removesuffix(SUMS)
        if weight + COUNTS not in file.tensors:
            raise CheckpointError(f"imatrix {path}: has {shown(name)}, but no {shown(weight + COUNTS)}")
        sums, counts = (np.asarray(file.read(n).expand(), np.float32) for n in (name, weight + COUNTS))
        sums, counts = sums.reshape(-1, sums.shape[-1]), counts.reshape(-1, 1)
        if len(sums) != len(counts):
            raise CheckpointError(
                f"imatrix {path}: {shown(weight)} has {len(sums)} rows of sums and {len(counts)} counts"
            )
        means = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
        found[weight] = means[0] if len(means) == 1 else means
    return found


def _read_dat(path: Path, data: bytes) -> dict[str, Importance]:
    """Each entry: length and text of its name, calls, number of values, and their means times the calls."""
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


class WeighedCheckpoint(WrappedCheckpoint):
    """A checkpoint whose tensors come with their importance, by its own names for them."""

    def __init__(self, checkpoint: Checkpoint, importance: Mapping[str, Importance]):
        super().__init__(checkpoint)
        self._importance = importance

    def read(self, name: str) -> Stored:
        """One tensor; its importance is `[i]`, or `[experts, i]`."""
        stored = self._base.read(name)
        found = self._importance.get(name)
        if found is None:
            return stored
        wanted = stored.shape[-1:] if len(stored.shape) < 3 else (stored.shape[0], stored.shape[-1])
        if found.size != np.prod(wanted):
            raise CheckpointError(f"{stored.origin}: the imatrix has {found.size:,} values for it; expected {wanted}")
        return stored._replace(importance=found.reshape(wanted))
