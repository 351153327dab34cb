"""Directories that `jaxllm convert` made, as a Checkpoint: weights as the engine keeps them, in Orbax arrays.

`jaxllm.json` says which model it is and how each weight is kept; `weights/` holds the arrays, for one device and not
in tiles, so that every machine can take them; tokenizer and configs lie beside them. Nothing is decoded or encoded
at loading: rows are laid out for the mesh, and on a CPU moved into the tiles of its kernels.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.quantization.coded import CodedKind, OrderedKind, as_stored, fp8_blocks, groups, per_channel
from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.stored import FLOATS, Stored
from jaxllm.quantization.weight import DenseKind, Weight, WeightKind
from jaxllm.weights import fields
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.fields import MAX_RANK, MAX_SIZE, FieldKinds, check_fields, is_storable, shown
from jaxllm.weights.folder import MANIFEST, model_file, read_generation_config, read_text
from jaxllm.weights.names import NameMap, Source

ARRAYS = "weights"
VERSION = 1
GROUP_BYTES = 256 * 2**20  # weights are read in groups of this size: few calls, and little memory

LABELS = {np.dtype(dtype).name: label for label, dtype in FLOATS.items()}

SCALES = ("float16", "bfloat16", "float32", "float8_e8m0fnu", "float8_e4m3fn")

SAVED_KINDS: dict[str, tuple[Callable[..., WeightKind], FieldKinds]] = {  # each kind's fields in a manifest
    "dense": (DenseKind, {"dtype": fields.one_of(*LABELS)}),
    "gguf": (GgufKind, {"type": fields.one_of(*FORMATS)}),
    "per_channel": (per_channel, {"codes": fields.one_of("int8", "float8_e4m3fn"), "activations": fields.FLAG}),
    "groups": (groups, {
        "bits": fields.FieldKind("2, 4 or 8", lambda value: type(value) is int and value in (2, 4, 8)),
        "block": fields.whole(2, 2**20), "symmetric": fields.FLAG, "scale": fields.one_of(*SCALES),
        "levels": fields.many(fields.real(-1e6, 1e6), 256),
    }),
    "fp8_blocks": (fp8_blocks, {"rows": fields.whole(1, 2**20), "block": fields.whole(1, 2**20)}),
    "mxfp8": (partial(fp8_blocks, rows=1, scale=np.dtype(ml_dtypes.bfloat16)), {"block": fields.whole(1, 2**20)}),
}  # fmt: skip

TYPES = ("dtype", "codes", "scale")  # fields that name types

ORDERED = "ordered"  # a further field of kinds whose inputs were sorted: their order's name, or true for some order

_SEGMENT = re.compile(r"(.*)\.(\d+)")
_ORDER = re.compile("[0-9a-f]{16}")


class SavedTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A matrix or vector of `shape`, and how it is kept: an entry of `SAVED_KINDS`."""

    shape: tuple[int, ...]
    kind: dict[str, Any]


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The content of `jaxllm.json`.

    Attributes:
        version: of this format.
        made_by: the jaxllm that wrote it, for people.
        source: the model argument it was made from, for people.
        family, decoder, tasks: the model, as `models.registry` and `models.tasks` describe it.
        isq, isq_map: what the weights were quantized to on the way.
        tensors: parameters by their paths in the model; `path.0`, `path.1`, … are segments that are kept differently.
    """

    version: int
    made_by: str
    source: str
    family: str
    decoder: dict[str, Any]
    tasks: dict[str, Any]
    eos_token_id: list[int]
    isq: str | None
    isq_map: dict[str, str]
    tensors: dict[str, SavedTensor]


class SavedCheckpoint(Checkpoint):
    """A directory with a manifest and Orbax arrays; its tensors are parameters, or segments, kept as `kinds` says."""

    format = "orbax"

    def __init__(self, path: Path):
        self.path = path
        self.manifest = _read_manifest(path)
        self.config = msgspec.to_builtins(self.manifest)
        self.generation_config = read_generation_config(path)
        self.kinds = _kinds(path, self.manifest)
        shapes = {name: tensor.shape for name, tensor in self.manifest.tensors.items()}
        self.tensors = {name: TensorInfo(shape, kind_name(self.kinds[name])) for name, shape in shapes.items()}
        self._group_of = {name: group for group in _groups(self.tensors, self.kinds) for name in group}
        self._held: dict[str, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def is_requantized(self) -> bool:
        """Whether the kinds of its weights were asked for; otherwise they are the source file's."""
        return bool(self.manifest.isq or self.manifest.isq_map)

    @property
    def names(self) -> NameMap:
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            segment = _SEGMENT.fullmatch(name)
            found.setdefault(segment[1] if segment else name, []).append(name)
        return {path: (tuple(map(Source, tensors)),) for path, tensors in found.items()}

    def read(self, name: str) -> Stored:
        """One tensor as it was kept. Its neighbours are read with it, and held until they are asked for."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        with self._lock:
            if self._closed:
                raise CheckpointError(f"{self.path}: closed")
            if name not in self._held:
                self._held |= read_arrays(self.path / ARRAYS, {n: self._abstract(n) for n in self._group_of[name]})
            held = self._held.pop(name)
        arrays = [held[field] for field in self._abstract(name)]  # Orbax gives them by name, in its own order
        info, kind = self.tensors[name], self.kinds[name]
        origin = f"{self.path}: tensor {shown(name)}"
        if isinstance(kind, DenseKind | GgufKind):
            return Stored(arrays[0], info.dtype, info.shape, packed=isinstance(kind, GgufKind), origin=origin)
        weight = jax.tree.unflatten(jax.tree.structure(kind.abstract(info.shape)), arrays)
        return as_stored(weight, info.dtype, origin)

    def _abstract(self, name: str) -> dict[str, jax.ShapeDtypeStruct]:
        return arrays_of(self.kinds[name].abstract(self.tensors[name].shape))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held.clear()


def describe(kind: WeightKind) -> dict[str, Any]:
    """A kind's entry in a manifest. Raises ConfigError for a kind that has none."""
    if isinstance(kind, OrderedKind):
        return describe(kind.kind) | {ORDERED: kind.order or True}
    if isinstance(kind, DenseKind):
        return {"name": "dense", "dtype": kind.dtype.name}
    if isinstance(kind, GgufKind):
        return {"name": "gguf", "type": kind.type}
    if not isinstance(kind, CodedKind):
        known = ", ".join(SAVED_KINDS)
        raise ConfigError(f"weights kept as {type(kind).__name__} cannot be saved; those that can are {known}")
    coding, (rows, block) = kind.coding, kind.coding.block
    if coding.of_rows:
        return {"name": "per_channel", "codes": coding.codes.name, "activations": coding.activations}
    if coding.of_blocks:
        if coding.scale != np.float32:
            return {"name": "mxfp8", "block": block}
        return {"name": "fp8_blocks", "rows": rows, "block": block}
    return {"name": "groups", "bits": coding.bits, "block": block, "symmetric": coding.symmetric} | {
        "scale": coding.scale.name, "levels": coding.levels
    }  # fmt: skip


def arrays_of(weight: Weight) -> dict[str, Any]:
    """The arrays of a weight by its kind's names for them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(weight):  # type: ignore[arg-type]
        value = None if field.metadata.get("static") else getattr(weight, field.name)
        if value is not None:
            found |= arrays_of(value) if isinstance(value, Weight) else {field.name: value}
    return found


def save_arrays(directory: Path, tensors: dict[str, dict[str, np.ndarray]]) -> None:
    """Write host arrays as an Orbax checkpoint. Raises OSError."""
    import orbax.checkpoint as ocp

    before = sys.unraisablehook
    sys.unraisablehook = partial(_unless_late, before)
    try:
        _orbax().save(directory.absolute(), args=ocp.args.PyTreeSave(tensors))
    except Exception as error:  # tensorstore's and Orbax's own are of many types
        raise OSError(one_line(error)) from error
    sys.unraisablehook = before


def read_arrays(
    directory: Path, wanted: dict[str, dict[str, jax.ShapeDtypeStruct]]
) -> dict[str, dict[str, np.ndarray]]:
    """Some of an Orbax checkpoint's arrays, in host memory. Raises CheckpointError if one is not as `wanted` says."""
    import orbax.checkpoint as ocp

    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True)
    try:
        found = _orbax().restore(directory.absolute(), args=arguments)
    except Exception as error:  # as above
        raise CheckpointError(f"{directory}: damaged or incomplete: {one_line(error)}") from error
    for name, arrays in wanted.items():
        for field, array in arrays.items():
            got = found[name][field]
            if (got.shape, got.dtype) != (array.shape, array.dtype):
                raise CheckpointError(
                    f"{directory}: {name}.{field} is {got.dtype} {got.shape}; expected {array.dtype} {array.shape}"
                )
    return found


def _unless_late(otherwise: Callable[[Any], Any], unraisable: Any) -> None:
    """Ignore writes that fail since Orbax closed its event loop at the first failure; Python would print them."""
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        otherwise(unraisable)


def _orbax() -> Any:
    """A checkpointer without compression: quantized weights hardly shrink, and should be fast to read."""
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


def _read_manifest(path: Path) -> Manifest:
    file, text = model_file(path, MANIFEST), read_text(path, MANIFEST)
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if version != VERSION:
            raise CheckpointError(
                f"{file}: version is {shown(version)}; this jaxllm reads {VERSION}: convert the model again"
            )
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None


def _kinds(path: Path, manifest: Manifest) -> dict[str, WeightKind]:
    found: dict[str, WeightKind] = {}
    size = fields.whole(0, MAX_SIZE)
    for name, tensor in manifest.tensors.items():
        here = f"{path / MANIFEST}: tensor {shown(name)}: "
        if not all(map(size.fits, tensor.shape)) or not is_storable(tensor.shape) or not tensor.shape:
            raise CheckpointError(f"{here}shape is {tensor.shape}; accepted are 1 to {MAX_RANK} sizes")
        found[name] = kind = _kind(tensor.kind, here)
        if tensor.shape[-1] % kind.block:
            raise CheckpointError(f"{here}{tensor.shape[-1]} inputs are no whole blocks of {kind.block}")
    return found


def _kind(given: dict[str, Any], here: str) -> WeightKind:
    order = given.get(ORDERED)
    if order is True or (isinstance(order, str) and _ORDER.fullmatch(order)):
        kind = _kind({name: value for name, value in given.items() if name != ORDERED}, here)
        if isinstance(kind, CodedKind):
            return OrderedKind(kind, "" if order is True else order)
    check_fields({"name": given.get("name")}, {"name": fields.one_of(*SAVED_KINDS)}, f"{here}kind ")
    make, known = SAVED_KINDS[given["name"]]
    if given.keys() != known.keys() | {"name"}:
        raise CheckpointError(f"{here}kind is {shown(given)}; accepted are {', '.join(known)}")
    check_fields(given, known, f"{here}kind ")
    values: dict[str, Any] = {name: np.dtype(given[name]) if name in TYPES else given[name] for name in known}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return make(**({"dtype": np.dtype(np.float32)} | values))


def kind_name(kind: WeightKind) -> str:
    """The name of a kind in `TensorInfo`: GGML's, of blocks and of floats."""
    if isinstance(kind, DenseKind):
        return LABELS[kind.dtype.name]
    return kind.type if isinstance(kind, GgufKind) else describe(kind)["name"]


def _groups(tensors: dict[str, TensorInfo], kinds: dict[str, WeightKind]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, info in tensors.items():
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kinds[name].abstract(info.shape)))
        if groups[-1] and held + nbytes > GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    return groups
