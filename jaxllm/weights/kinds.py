"""The kind that each weight is kept as: the checkpoint's, its expansion, or the kind it is quantized to on the way."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.quantization.coded import OrderedKind
from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.gpu_tiles import gpu_tiled
from jaxllm.quantization.schemes import AT_THE_ENDS, KEPT, RECODED, RECODED_OTHERS, SCHEMES, coded_kind, fitting
from jaxllm.quantization.stored import FLOATS, common_coding
from jaxllm.quantization.tiles import tiled
from jaxllm.quantization.weight import WeightKind
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.loader import ParamSpec, find_sources
from jaxllm.weights.names import NameMap, Source
from jaxllm.weights.saved import SavedCheckpoint

NEVER_QUANTIZED = ("*.router.weight", "*.shared_gate.weight", "*.beta_decay.weight")
"""Small weights whose errors send a token to other experts, or stay in a state for long."""

ABSORBED = "*.kv_b.weight"  # latent attention absorbs it, and a GPU keeps it in 16-bit floats, since it is small

ENDS = ("embed.weight", "head.weight")


@dataclass
class KindChooser:
    """Called with each weight of a model, it gives the weight's kind, or one for each segment; see `abstract_model`.

    Attributes:
        checkpoint: the weights; without tensors (dummy weights) only `isq` decides.
        names: where parameters come from.
        tp: devices that a matrix's inputs may be divided over.
        packed: whether a GGUF's blocks, a checkpoint's codes, or weights quantized by `jaxllm convert` are kept as they
            are.
        isq: what weights are quantized to; None for nothing.
        tiles: whether weights go into the tiles of the C++ kernels for CPUs, if those have them.
        in_bf16: whether products with those round to bfloat16 instead of int8.
        gpu_tiles: likewise into those of NVIDIA GPUs' kernels.
        isq_map: patterns of tensor names -> schemes that take precedence over `isq`; the first that fits counts.
        recoded: type in the file and type kept -> the number of tensors that are encoded anew.
    """

    checkpoint: Checkpoint
    names: NameMap
    tp: int = 1
    packed: bool = True
    isq: str | None = None
    isq_map: Mapping[str, str] = field(default_factory=dict)
    tiles: bool = False
    in_bf16: bool = False
    gpu_tiles: bool = False
    recoded: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        asked = "isq" if self.isq else "isq_map" if self.isq_map else None
        types = sorted({info.dtype for info in self.checkpoint.tensors.values() if self._is_packed(info)})
        if asked and self.packed and types:
            raise ConfigError(
                f"{asked} is set, but {self.checkpoint.path} is quantized already ({', '.join(types)}); "
                "accepted with dequantize, which expands it first"
            )
        for pattern in self.isq_map if self.checkpoint.tensors else ():
            if not fnmatch.filter(self.checkpoint.tensors, pattern):
                raise ConfigError(f"isq_map has {pattern!r}, which no tensor of {self.checkpoint.path} is named like")

    def __call__(self, spec: ParamSpec) -> tuple[WeightKind, ...]:
        saved = isinstance(self.checkpoint, SavedCheckpoint)
        if self.gpu_tiles and not saved and fnmatch.fnmatchcase(spec.path, ABSORBED) and spec.dtype.itemsize == 2:
            kinds = spec.kinds
        elif not self.checkpoint.tensors:
            kinds = (self._scheme_kind(spec, spec.path),)
        else:
            kinds = tuple(self._of(spec, source) for source in find_sources(self.checkpoint, spec, self.names))
            kinds = kinds[:1] if len(set(kinds)) == 1 else kinds
        rows, inputs, stack = self._rows(spec), self._inputs(spec), len(spec.shape) > 2
        if self.gpu_tiles:
            return tuple(gpu_tiled(kind, rows, inputs) for kind in kinds)
        if not self.tiles:
            return kinds
        return tuple(tiled(kind, rows, inputs, stack=stack, in_bf16=self.in_bf16) for kind in kinds)

    @property
    def notes(self) -> list[str]:
        """A sentence for each type that is encoded anew, and for drawn weights that are not of the file's type."""
        anew = [
            f"{count} weights stored as {stored} are kept as {kept}: quantized once more at load"
            for (stored, kept), count in sorted(self.recoded.items())
        ]
        drawn = not self.checkpoint.tensors and self.checkpoint.config.get("quantization_config")
        return anew + (
            ["dummy weights are not quantized as quantization_config says; isq quantizes them"] if drawn else []
        )

    def _is_packed(self, info: TensorInfo) -> bool:
        if info.coding is not None:
            return True
        return self.checkpoint.format != "safetensors" and info.dtype not in FLOATS

    def _of(self, spec: ParamSpec, source: Source) -> WeightKind:
        infos = [self.checkpoint.tensors[name] for name in source.tensors]
        if not (self.packed and any(map(self._is_packed, infos))):
            return self._scheme_kind(spec, source.name, {info.dtype for info in infos} if source.moves_rows else set())
        if isinstance(self.checkpoint, SavedCheckpoint):
            saved = self.checkpoint.kinds[source.name]
            if not isinstance(saved, OrderedKind):
                return replace(saved, dtype=spec.dtype)  # type: ignore[type-var]
            if not self._divides_stack(spec):
                columns = replace(saved.kind, dtype=spec.dtype)  # type: ignore[type-var]
                return replace(saved, kind=columns, divided=self._input_parts(spec) > 1)
        types, coding = sorted({info.dtype for info in infos}), common_coding([info.coding for info in infos])
        if coding is not None and source.keeps(coding) and not (coding.order and self._divides_stack(spec)):
            stored = [segment.rows for segment in spec.layout.segments] if spec.layout else []
            moved = [*self._rows(spec), *stored]  # numbers of rows that move together: blocks of rows must divide them
            devices = self._input_parts(spec)
            return coded_kind(coding, spec.dtype, moved, spec.shape[-1], devices=devices, blocks=self.tiles)
        if len(types) == 1 and types[0] in FORMATS and source.moves_blocks(FORMATS[types[0]].elements):
            return GgufKind(types[0], spec.dtype)
        scheme = RECODED.get(types[0], RECODED_OTHERS) if source.moves_rows else RECODED_OTHERS
        kind = fitting(scheme, self._inputs(spec), spec.dtype)
        kept = kind.type if isinstance(kind, GgufKind) else np.dtype(spec.dtype).name
        self.recoded[" and ".join(types), kept] += 1
        return kind

    def _scheme_kind(self, spec: ParamSpec, tensor: str, stored: Set[str] = frozenset()) -> WeightKind:
        """The kind by `isq_map` and `isq`; as declared if neither applies.

        If a scheme's blocks do not fit, the file's own blocks are kept if they take no more space than the substitute.
        """
        (declared,) = spec.kinds
        by_name = (scheme for pattern, scheme in self.isq_map.items() if fnmatch.fnmatchcase(tensor, pattern))
        scheme = next(by_name, None)
        if scheme is None and self.isq and not any(fnmatch.fnmatchcase(spec.path, p) for p in NEVER_QUANTIZED):
            scheme = AT_THE_ENDS.get(self.isq, self.isq) if spec.path in ENDS else self.isq
        if scheme is None or scheme == KEPT:
            return declared
        kind, inputs = fitting(scheme, self._inputs(spec), spec.dtype), self._inputs(spec)
        if inputs % SCHEMES[scheme](spec.dtype).block and isinstance(kind, GgufKind) and len(stored) == 1:
            (own,), instead = stored, FORMATS[kind.type]
            if own in FORMATS and inputs % FORMATS[own].elements == 0 and FORMATS[own].density <= instead.density:
                return GgufKind(own, spec.dtype)
        return kind

    def _divides_stack(self, spec: ParamSpec) -> bool:
        """Whether devices have parts of each expert's inputs: sorted inputs would be on other devices."""
        return len(spec.shape) > 2 and self._input_parts(spec) > 1

    def _rows(self, spec: ParamSpec) -> list[int]:
        layout = spec.layout
        if layout and not layout.pad_to:
            return [segment.rows // segment.shards for segment in layout.segments]
        return [spec.shape[-2] // self.tp if spec.axes[-2] is not None else spec.shape[-2]]

    def _inputs(self, spec: ParamSpec) -> int:
        return spec.shape[-1] // self._input_parts(spec)

    def _input_parts(self, spec: ParamSpec) -> int:
        return self.tp if spec.axes[-1] is not None else 1
