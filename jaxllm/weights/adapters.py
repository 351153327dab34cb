"""LoRA adapters as PEFT and llama.cpp store them: small matrices that are added to those of a model.

The settings in PEFT's adapter_config.json: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError, one_line
from jaxllm.weights.fields import (
    FLAG,
    NULL,
    TEXT,
    FieldKind,
    FieldKinds,
    check_fields,
    either,
    many,
    one_of,
    real,
    shown,
    whole,
)
from jaxllm.weights.folder import NO_PICKLES, PICKLES, check_no_device, model_file, read_object
from jaxllm.weights.gguf_file import GGUFCheckpoint
from jaxllm.weights.safetensors_file import read_tensors

SETTINGS_FILE = "adapter_config.json"
MAX_RANK = 2**14
ALL_LINEAR = "all-linear"

_RANK, _ALPHA = whole(1, MAX_RANK), real(-1e9, 1e9)
_NAMES = either(TEXT, many(TEXT), NULL)
_LAYERS = either(whole(0, 2**16), many(whole(0, 2**16)), NULL)


def _pattern_of(kind: FieldKind) -> FieldKind:
    return FieldKind(
        f"an object whose values are {kind.accepted}, or null",
        lambda value: value is None or (isinstance(value, dict) and all(map(kind.fits, value.values()))),
    )


_FIELDS: FieldKinds = {  # the fields of the file that are read
    "r": _RANK, "lora_alpha": _ALPHA, "use_rslora": either(FLAG, NULL), "use_dora": either(FLAG, NULL),
    "rank_pattern": _pattern_of(_RANK), "alpha_pattern": _pattern_of(_ALPHA), "target_modules": _NAMES,
    "exclude_modules": _NAMES, "modules_to_save": _NAMES, "layers_to_transform": _LAYERS, "layers_pattern": _NAMES,
    "fan_in_fan_out": either(FLAG, NULL), "bias": either(one_of("none", "all", "lora_only"), NULL),
    "base_model_name_or_path": either(TEXT, NULL), "ensure_weight_tying": either(FLAG, NULL),
}  # fmt: skip

_TRAINING = frozenset((  # settings that concern training alone, or only go with one that is refused
    "peft_type", "auto_mapping", "revision", "task_type", "inference_mode", "lora_dropout", "init_lora_weights",
    "runtime_config", "peft_version", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core",
    "qalora_group_size", "kasa_config", "velora_config",
))  # fmt: skip

_MERGE = "merge it into its base model with PEFT's merge_and_unload(), and serve the result"

_REFUSED = {  # settings that change what an adapter computes, and what to do instead
    "target_parameters": "adapters of experts that are stored as one stack are not supported; " + _MERGE,
    "trainable_token_indices": "single rows of an embedding cannot be replaced; " + _MERGE,
    "lora_bias": "a bias beside B is not supported; " + _MERGE,
    "layer_replication": "layers cannot be repeated; " + _MERGE,
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt is not supported",
    "use_qalora": "inputs that are pooled by group are not supported; " + _MERGE,
    "megatron_config": "Megatron's parallel layers are not supported; train it with PEFT's linear layers",
    "use_bdlora": "block-diagonal matrices are not supported; " + _MERGE,
}

_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # of `init_lora_weights`: they change the base
_CONVERT = (
    "the adapter belongs to a base model that this has changed; save it again for the unchanged one with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=PATH_OF_THE_ADAPTER_AT_THE_BEGINNING), or merge it"
)


_TIED = ("embed_tokens", "lm_head", "wte")

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?P<kind>\.weight|\.bias)?"
)
"""A tensor of a layer: `q_proj.lora_A.weight`, or in older files, which have the adapter's name in it,
`q_proj.lora_A.default.weight`."""
_SAVED = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.(?P<kind>weight|bias)")
"""A whole tensor, of a module that was trained, or a bias."""
_UNCHANGED = ".base_layer.weight"  # a matrix of the model itself, which PEFT stores beside the change of an embedding
_LANGUAGE_MODEL = re.compile(r"(model\.)?language_model\.(model\.)?(?P<rest>.*)")  # of a multimodal model
_INPUTS_FIRST = re.compile(r"(transformer\.)?h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)")  # GPT-2's, stored `[in, out]`

LayerParts = dict[str, np.ndarray]


@dataclass(frozen=True)
class LowRank:
    """A change of the matrix of one linear layer, `[out, in]`: `weight + scale * b @ a`.

    With a magnitude it is DoRA (Liu et al. 2024, arXiv:2402.09353): each row of that sum is then scaled to this length,
    `magnitude / norm(weight + scale * b @ a, axis=1)`.

    Attributes:
        a: `[r, in]`, as stored.
        b: `[out, r]`, as stored.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        magnitude: `[out]`, the length of each row.
        transposed: whether the checkpoint has this matrix as `[in, out]`, as it has GPT-2's layers, and embeddings,
            whose inputs are the vocabulary.
    """

    a: Shaped[np.ndarray, "r in"]
    b: Shaped[np.ndarray, "out r"]
    scale: float
    magnitude: Shaped[np.ndarray, " out"] | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.transposed else shape

    def added_to(self, weight: Shaped[np.ndarray, "N M"], strength: float = 1.0) -> Float[np.ndarray, "N M"]:
        """The checkpoint's tensor with this added, float32; `strength` multiplies `scale`."""
        whole = np.array(weight.T if self.transposed else weight, np.float32)
        whole += (self.scale * strength) * (self.b.astype(np.float32) @ self.a.astype(np.float32))
        if self.magnitude is not None:
            whole *= (self.magnitude.astype(np.float32) / np.linalg.norm(whole, axis=1))[:, None]
        return whole.T if self.transposed else whole


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        format: "peft" or "gguf", whose tensor names are used. PEFT's are those of the language model alone
            (`model.layers.0.self_attn.q_proj.weight`), also where a multimodal model has it under another name.
        path: the folder or file.
        updates: what is added to which tensor of the model.
        replaced: tensors that replace the model's before anything is added to them: those of PEFT's `modules_to_save`,
            and biases that were trained.
        base_model: the adapter's words about the model that it was trained on, to be shown to people.
    """

    format: str
    path: Path
    updates: dict[str, LowRank]
    replaced: dict[str, np.ndarray]
    base_model: str | None = None

    @property
    def rank(self) -> int:
        """The greatest rank of its matrices; 0 if it only replaces tensors."""
        return max((len(update.a) for update in self.updates.values()), default=0)


def open_adapter(path: Path) -> Adapter:
    """Read a folder that PEFT saved (adapter_config.json, adapter_model.safetensors) or a GGUF adapter into memory.

    Raises CheckpointError if there is no adapter, it is corrupt, or it uses something that is not supported. The
    message names the file, the key or tensor, and what is accepted.
    """
    if path.suffix in PICKLES and path.is_file():
        raise CheckpointError(f"{one_line(path)}: {NO_PICKLES}")
    if path.suffix == ".gguf" and path.is_file():
        return _read_gguf(path)
    if path.is_dir():
        return _read_peft(path)
    found = "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{one_line(path)}: {found}; an adapter is a folder with {SETTINGS_FILE} and adapter_model.safetensors, or a "
        ".gguf file"
    )


def _read_peft(folder: Path) -> Adapter:
    settings = _read_settings(folder)
    file = model_file(folder, TENSORS_FILE)
    if not file.is_file():
        if (folder / PICKLE_FILE).exists():
            raise CheckpointError(
                f"{folder / PICKLE_FILE}: pickle files can run code and are not read; convert it with PEFT: "
                "PeftModel.from_pretrained(base, folder).save_pretrained(new_folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{folder}: holds no {TENSORS_FILE}")
    layers, replaced = _sorted_by_layer(file, read_tensors(file))
    updates = {}
    for module, parts in layers.items():
        settings.check_target(module)
        updates[f"{_plain(module)}.weight"] = _low_rank(file, settings, module, parts)
    if settings.fan_in_fan_out and not any(_INPUTS_FIRST.fullmatch(module) for module in layers):
        raise CheckpointError(
            f"{settings.path}: fan_in_fan_out is true, but no layer is one of GPT-2's; accepted is false"
        )
    if not updates and not replaced:
        raise CheckpointError(f"{file}: holds no tensors")
    return Adapter("peft", folder, updates, replaced, settings.base_model_name_or_path)


def _sorted_by_layer(file: Path, tensors: LayerParts) -> tuple[dict[str, LayerParts], LayerParts]:
    """(module -> its parts, the whole tensors), under the names of PEFT's modules and of tensors."""
    layers: dict[str, LayerParts] = {}
    replaced: LayerParts = {}
    for stored, tensor in tensors.items():
        if stored.endswith(_UNCHANGED):
            continue
        here = f"{file}: tensor {shown(stored)}"
        if tensor.dtype.kind not in "fV":  # ml_dtypes' are "V"
            raise CheckpointError(f"{here} holds {tensor.dtype}; accepted are floats")
        name = stored.removeprefix("base_model.model.")
        if found := _PART.fullmatch(name):
            kept, key = layers.setdefault(found["module"], {}), found["part"]
            if found["kind"] == ".bias":
                raise CheckpointError(f"{here}: a bias beside B is not supported")
            if found["module"].endswith((".base_layer", ".experts")):
                accepted = "accepted are linear layers and embeddings"
                raise CheckpointError(f"{here} is of experts that are stored as one stack; {accepted}")
        elif "lora_" not in name and "token_adapter" not in name and (found := _SAVED.fullmatch(name)):
            kept, key = replaced, f"{_plain(found['module'])}.{found['kind']}"
        else:
            raise CheckpointError(
                f"{here} is not known; accepted are lora_A, lora_B, lora_embedding_A, lora_embedding_B and "
                "lora_magnitude_vector of a module, and a module's weight or bias"
            )
        if key in kept:
            raise CheckpointError(f"{here} is there twice, under the names of two adapters")
        kept[key] = tensor
    return layers, replaced


def _low_rank(file: Path, settings: PeftSettings, module: str, parts: LayerParts) -> LowRank:
    embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    for name in names:
        if name not in parts:
            raise CheckpointError(f"{file}: {name} of {shown(module)} is missing")
    a, b = (parts[name] for name in names)
    rank = settings.rank(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{file}: {names[0]} and {names[1]} of {shown(module)} are {a.shape} and {b.shape}; accepted are "
            f"({rank}, inputs) and (outputs, {rank}), for the rank of this module is {rank} in {settings.path.name}"
        )
    return LowRank(
        a, b, settings.scale(module), _magnitude(file, settings, module, parts, b.shape[0]),
        transposed=embedding or _INPUTS_FIRST.fullmatch(module) is not None,
    )  # fmt: skip


def _magnitude(file: Path, settings: PeftSettings, module: str, parts: LayerParts, rows: int) -> np.ndarray | None:
    magnitude, here = parts.get("lora_magnitude_vector"), f"{file}: lora_magnitude_vector of {shown(module)}"
    if (magnitude is not None) != settings.use_dora:
        found, asked = "missing" if magnitude is None else "there", str(settings.use_dora).lower()
        raise CheckpointError(f"{here} is {found}, but use_dora is {asked} in {settings.path.name}")
    if magnitude is not None and magnitude.shape != (rows,):
        raise CheckpointError(f"{here} is {magnitude.shape}; accepted is ({rows},)")
    return magnitude


def _plain(module: str) -> str:
    found = _LANGUAGE_MODEL.fullmatch(module)
    if found is None:
        return module
    return found["rest"] if found["rest"].startswith("lm_head") else f"model.{found['rest']}"


def save_adapter(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write arrays, by PEFT's names, and the fields of adapter_config.json into an existing folder."""
    (folder / SETTINGS_FILE).write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / TENSORS_FILE)


@dataclass(frozen=True)
class PeftSettings:
    """The settings in adapter_config.json that matter after training; the names are PEFT's."""

    path: Path
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    modules_to_save: list[str] = field(default_factory=list)
    layers_to_transform: list[int] = field(default_factory=list)
    layers_pattern: list[str] = field(default_factory=list)
    fan_in_fan_out: bool = False
    bias: str = "none"
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of the product of a module's matrices."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def check_target(self, module: str) -> None:
        """Raises CheckpointError for a module whose matrices are stored although no setting asks for them.

        With `ensure_weight_tying` the head's come with the embedding's, and the other way around.
        """
        if self.ensure_weight_tying and module.endswith(_TIED):
            return
        has = f"{self.path}: has matrices of {shown(module)}"
        if _matches(self.exclude_modules, module):
            raise CheckpointError(f"{has}, but exclude_modules is {shown(self.exclude_modules)}")
        if self.target_modules not in (None, ALL_LINEAR) and not _matches(self.target_modules, module):
            raise CheckpointError(f"{has}, which target_modules does not name: it is {shown(self.target_modules)}")
        layer = _layer_number(module, self.layers_pattern) if self.layers_to_transform else None
        if layer is not None and layer not in self.layers_to_transform:
            raise CheckpointError(f"{has}, but layers_to_transform is {shown(self.layers_to_transform)}")


def _read_settings(folder: Path) -> PeftSettings:
    given, path = read_object(folder, SETTINGS_FILE), folder / SETTINGS_FILE
    _check_supported(path, given)
    check_fields(given, _FIELDS, f"{path}: ")
    read = {key: value for key in _FIELDS if (value := given.get(key)) is not None}
    for key in ("layers_to_transform", "layers_pattern", "modules_to_save"):
        if key in read and not isinstance(read[key], list):
            read[key] = [read[key]]
    settings = PeftSettings(path, **read)
    modules = [text for text in (settings.target_modules, settings.exclude_modules) if isinstance(text, str)]
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern, *modules, *settings.layers_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{path}: {shown(pattern)} is no regular expression: {error}") from None
    return settings


def _check_supported(path: Path, given: dict[str, Any]) -> None:
    if (kind := given.get("peft_type")) != "LORA":
        raise CheckpointError(f"{path}: peft_type is {shown(kind)}; accepted is 'LORA'")
    for key, why in _REFUSED.items():
        if given.get(key):
            raise CheckpointError(f"{path}: {key} is {shown(given[key])}: {why}")
    start = given.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(f"{path}: init_lora_weights is {shown(start)}: {_CONVERT}")
    for key in sorted(given.keys() - _FIELDS.keys() - _REFUSED.keys() - _TRAINING):
        if given[key] not in (None, False, "", [], {}):
            raise CheckpointError(
                f"{path}: {shown(key)} is {shown(given[key])}, a setting that is not known here; if it concerns "
                "training alone, take it out of the file"
            )


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _matches(targets: str | list[str] | None, module: str) -> bool:
    """Whether `targets` names a module or the end of its name, or is a regular expression for the whole name."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def _layer_number(module: str, patterns: list[str]) -> int | None:
    """`model.layers.3.mlp.up_proj` -> 3; None for a module that is in no layer."""
    tried = (re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns or [r"[^.]*"])
    return next((int(found[1]) for found in tried if found), None)


ALPHA = "adapter.lora.alpha"
EMBEDDING = "token_embd.weight"
INVOCATION = "adapter.alora.invocation_tokens"


def _read_gguf(path: Path) -> Adapter:
    check_no_device(path)
    file = GGUFCheckpoint(path)
    alpha = _gguf_alpha(path, file.config)
    tensors = {name: np.array(file.read(name).expand()) for name in file.tensors}
    updates, replaced = {}, {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part == "lora_a":
            updates[base] = _from_gguf(path, base, tensor, tensors.get(f"{base}.lora_b"), alpha)
        elif part == "lora_b":
            if f"{base}.lora_a" not in tensors:
                raise CheckpointError(f"{path}: tensor {shown(f'{base}.lora_a')} is missing")
        elif name.endswith("_norm.weight"):
            replaced[name] = tensor
        else:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is not known; accepted are NAME.lora_a, NAME.lora_b and norms"
            )
    if not updates and not replaced:
        raise CheckpointError(f"{path}: holds no tensors")
    base_model = file.config.get("general.base_model.0.name")
    return Adapter("gguf", path, updates, replaced, base_model if isinstance(base_model, str) else None)


def _gguf_alpha(path: Path, metadata: dict[str, Any]) -> float:
    """`adapter.lora.alpha`; with 0 the product of the matrices is added as it is."""
    for key, accepted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != accepted:
            raise CheckpointError(f"{path}: {key} is {shown(metadata.get(key))}; accepted is {accepted!r}")
    if metadata.get(INVOCATION):
        raise CheckpointError(
            f"{path}: {INVOCATION} is set: an adapter that begins in the middle of a prompt is not supported"
        )
    check_fields(metadata, {ALPHA: real(-1e9, 1e9)}, f"{path}: ")
    return float(metadata.get(ALPHA, 0))


def _from_gguf(path: Path, base: str, a: np.ndarray, b: np.ndarray | None, alpha: float) -> LowRank:
    """An embedding's A is stored transposed, so that a row of it is a token's."""
    if b is None:
        raise CheckpointError(f"{path}: tensor {shown(f'{base}.lora_b')} is missing")
    embedding = base == EMBEDDING
    a = a.T if embedding and a.ndim == 2 else a
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{path}: lora_a and lora_b of {shown(base)} are {a.shape} and {b.shape}; accepted are (rank, inputs) and "
            "(outputs, rank), of linear layers and of the embedding"
        )
    rank = a.shape[0]
    return LowRank(np.ascontiguousarray(a), b, alpha / rank if alpha else 1.0, transposed=embedding)
