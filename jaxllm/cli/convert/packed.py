"""The plan of a conversion, and the formats that hold packed weights: a GGUF file made of another, and Orbax arrays."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import msgspec
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.start.build import eos_token_ids
from jaxllm.engine.start.options import DTYPES, check_imatrix
from jaxllm.errors import ConfigError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec, abstract_model, model_spec, with_importance
from jaxllm.models.tasks import read_tasks
from jaxllm.progress import Progress
from jaxllm.quantization.coded import Ordered
from jaxllm.quantization.gguf_encode import ENCODERS, encode
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.schemes import BLOCKS, RECODED, RECODED_OTHERS
from jaxllm.quantization.stored import FLOATS
from jaxllm.quantization.weight import DenseKind, Fused, Weight, WeightKind
from jaxllm.text.tokenizer import tokenizer_directory
from jaxllm.weights.checkpoint import Checkpoint, MergedCheckpoint, TensorInfo
from jaxllm.weights.folder import MANIFEST, model_file
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec, Value, find_sources, read_parameters
from jaxllm.weights.saved import ARRAYS, VERSION, Manifest, SavedTensor, arrays_of, describe, save_arrays
from jaxllm.weights.source import resolve_tokenizer

logger = logging.getLogger(__name__)

FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2k": 10, "q3k": 11, "q4k": 14, "q5k": 16, "q6k": 18,
}  # fmt: skip
"""llama.cpp's number of the mix that comes nearest, for programs that show it (`enum llama_ftype`)."""

NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "split.")


class ConversionPlan(NamedTuple):
    spec: ModelSpec
    params: list[ParamSpec]
    notes: list[str]
    """What is quantized once more, one sentence each."""


def plan_conversion(config: EngineConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Choose kinds as an engine would whose kernels take any. Raises ConfigError, CheckpointError."""
    check_imatrix(config)
    spec = model_spec(checkpoint)
    kinds = KindChooser(
        checkpoint,
        spec.names,
        config.tensor_parallel_size,
        packed=not config.dequantize,
        isq=config.isq,
        isq_map=config.isq_map or {},
    )
    _, params = abstract_model(spec, BuildOptions(DTYPES[config.dtype]), kinds)
    return ConversionPlan(spec, params, kinds.notes)


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates",
)  # fmt: skip


def copy_tokenizer(config: EngineConfig, checkpoint: Checkpoint, target: Path) -> None:
    """Put the tokenizer and the generation config into `target`. Raises ModelNotFoundError or CheckpointError."""
    generation = dict(checkpoint.generation_config)
    if not config.skip_tokenizer_init:
        name = config.tokenizer or config.model
        found = resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir)
        folder = tokenizer_directory(found)
        for file in TOKENIZER_FILES:
            _copy(folder, file, target)
        made = folder / "generation_config.json"
        if found != folder and "eos_token_id" not in generation and made.exists():  # of a GGUF's tokenizer
            generation = json.loads(made.read_text(encoding="utf-8")) | generation
    if generation:
        (target / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _copy(folder: Path, name: str, target: Path) -> None:
    file = model_file(folder, name)
    if file.is_dir():
        (target / name).mkdir()
        for inner in sorted(file.glob("*.jinja")):
            _copy(folder, f"{name}/{inner.name}", target)
    elif file.exists():
        shutil.copyfile(file, target / name)


def write_gguf(config: EngineConfig, checkpoint: Checkpoint, target: Path, on_progress: Progress | None) -> None:
    """Copy tensors, or encode them in other kinds. Raises ConfigError for sources and kinds other than GGUF."""
    if checkpoint.format != "gguf":
        raise ConfigError(
            f"`--to gguf` takes a GGUF file, whose metadata it copies; {checkpoint.path} is none: llama.cpp's "
            "convert_hf_to_gguf.py makes one, which can be quantized here"
        )
    plan = plan_conversion(config, checkpoint)
    types = _merged_types(checkpoint)
    if config.isq or config.isq_map or config.dequantize:
        types |= _types(checkpoint, plan)
    for name, info in checkpoint.tensors.items():
        if info.coding is not None and types.get(name, info.dtype) == info.dtype:
            raise ConfigError(f"{name} is {info.dtype}, which cannot be written; accepted with dequantize")
    weighed = with_importance(checkpoint, plan.spec, config.imatrix)
    writer = gguf.GGUFWriter(target, checkpoint.config["general.architecture"])
    try:
        file_type = FILE_TYPES[config.isq] if config.isq else checkpoint.config.get("general.file_type")
        _copy_metadata(checkpoint.path, writer, file_type)
        for name, info in checkpoint.tensors.items():
            announce(writer, name, info.shape, types.get(name, info.dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, info) in enumerate(checkpoint.tensors.items(), 1):
            writer.write_tensor_data(_data(weighed, name, info, types.get(name, info.dtype)))
            if on_progress:
                on_progress(done, len(checkpoint.tensors))
    finally:
        writer.close()


def _merged_types(checkpoint: Checkpoint) -> dict[str, str]:
    """The GGML type of each tensor that an adapter was merged into: that which it had, if that can be written."""
    if not isinstance(checkpoint, MergedCheckpoint):
        return {}
    had = {name: checkpoint.stored_type(name) for name in checkpoint.edited}
    return {
        name: kind if kind in ENCODERS or kind in FLOATS else BLOCKS[RECODED.get(kind, RECODED_OTHERS)].type
        for name, kind in had.items()
    }


def _types(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, str]:
    found = {}
    for spec in plan.params:
        sources = find_sources(checkpoint, spec, plan.spec.names)
        kinds = spec.kinds if len(spec.kinds) != 1 else spec.kinds * len(sources)
        for source, kind in zip(sources, kinds, strict=False):
            for name in source.tensors:
                info = checkpoint.tensors[name]
                if isinstance(checkpoint, MergedCheckpoint):
                    info = info._replace(dtype=checkpoint.stored_type(name))
                found[name] = _type(name, info, kind)
    return found


def _type(name: str, info: TensorInfo, kind: WeightKind) -> str:
    if isinstance(kind, GgufKind):
        return kind.type if info.shape[-1] % kind.block == 0 else info.dtype
    if not isinstance(kind, DenseKind):
        known = ", ".join(BLOCKS)
        raise ConfigError(f"{name} would be kept as {describe(kind)['name']}, which GGUF does not have; it has {known}")
    if info.dtype in FLOATS:
        return info.dtype
    return next(label for label, dtype in FLOATS.items() if dtype == kind.dtype)


def _copy_metadata(source: Path, writer: gguf.GGUFWriter, file_type: int | None) -> None:
    for field in gguf.GGUFReader(source).fields.values():
        if field.name.startswith(NOT_COPIED):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    if file_type is not None:
        writer.add_file_type(file_type)
    if "general.quantization_version" not in writer.kv_data[0]:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], dtype: str) -> None:
    kind = gguf.GGMLQuantizationType[dtype]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    in_bytes = (*shape[:-1], shape[-1] // elements * nbytes)
    stored, of = (shape, np.float32) if dtype in FLOATS else (in_bytes, np.uint8)
    writer.add_tensor_info(name, stored, np.dtype(of), int(np.prod(in_bytes)), raw_dtype=kind)


def _data(checkpoint: Checkpoint, name: str, info: TensorInfo, dtype: str) -> np.ndarray[Any, Any]:
    stored = checkpoint.read(name)
    if dtype == info.dtype:
        return stored.data
    if dtype in ENCODERS:
        return encode(stored.finite(), dtype, stored.importance)
    return stored.expand().astype(FLOATS[dtype])


def write_orbax(config: EngineConfig, checkpoint: Checkpoint, target: Path, on_progress: Progress | None) -> None:
    """Weights as one device keeps them, before any tiles; see `weights.saved`. All of them are in memory at the end."""
    plan = plan_conversion(config, checkpoint)
    for note in plan.notes:
        logger.warning(note)
    weighed = with_importance(checkpoint, plan.spec, config.imatrix)
    described: dict[str, SavedTensor] = {}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    target.mkdir()
    values = read_parameters(weighed, plan.params, plan.spec.names, plan.spec.ignored)
    for done, (spec, value) in enumerate(zip(plan.params, values, strict=True), 1):
        for name, kind, part in _parts(spec, value):
            described[name] = SavedTensor(part.shape, describe(kind))
            arrays[name] = arrays_of(part) if isinstance(part, Weight) else {"array": part}
        if on_progress:
            on_progress(done, len(plan.params))
    save_arrays(target / ARRAYS, arrays)
    manifest = Manifest(
        version=VERSION,
        made_by=f"jaxllm {version('jaxllm')}",
        source=config.model,
        family=plan.spec.family.name,
        decoder=msgspec.to_builtins(plan.spec.config),
        tasks=msgspec.to_builtins(read_tasks(checkpoint, plan.spec.config.encoder is not None)),
        eos_token_id=eos_token_ids(checkpoint),
        isq=config.isq,
        isq_map=dict(config.isq_map or {}),
        tensors=described,
    )
    (target / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    copy_tokenizer(config, checkpoint, target)


def _parts(spec: ParamSpec, value: Value) -> list[tuple[str, WeightKind, Any]]:
    """(name, kind, weight or array) of a parameter; of each segment by itself where they are of several kinds."""
    rows = [segment.rows for segment in spec.layout.segments] if spec.layout else []
    axis = spec.layout.axis if spec.layout else 0
    if not isinstance(value, Fused):
        kind = spec.kinds[0] if isinstance(value, Weight) else DenseKind(np.dtype(spec.dtype))
        return [(spec.path, kind, _rows(value, 0, sum(rows), axis))]
    found, segments = [], iter(enumerate(rows))
    for (kind, layout), part in zip(spec.runs, value.parts, strict=True):
        start = 0
        for _ in layout.segments if layout else ():
            index, size = next(segments)
            found.append((f"{spec.path}.{index}", kind, _rows(part, start, start + size, axis)))
            start += size
    return found


def _rows(value: Any, start: int, stop: int, axis: int) -> Any:
    """Some rows of each array, without the padding that follows; all of them where there is no layout."""
    if not stop:
        return value
    if isinstance(value, Ordered):
        return replace(value, weight=_rows(value.weight, start, stop, axis))  # the order is of inputs
    return jax.tree.map(lambda array: array[(slice(None),) * axis + (slice(start, stop),)], value)
