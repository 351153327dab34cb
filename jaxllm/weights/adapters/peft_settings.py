"""adapter_config.json: which of PEFT's settings are honoured, and which are refused by their name.

What each of them means: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
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
from jaxllm.weights.folder import read_object

SETTINGS_FILE = "adapter_config.json"
MAX_RANK = 2**14
ALL_LINEAR = "all-linear"

_RANK, _ALPHA = whole(1, MAX_RANK), real(-1e9, 1e9)
_NAMES = either(TEXT, many(TEXT), NULL)
_LAYERS = either(whole(0, 2**16), many(whole(0, 2**16)), NULL)


def _pattern_of(kind: FieldKind) -> FieldKind:
    """An object from patterns of module names to such values."""
    return FieldKind(
        f"an object whose values are {kind.accepted}, or null",
        lambda value: value is None or (isinstance(value, dict) and all(map(kind.fits, value.values()))),
    )


_FIELDS: FieldKinds = {
    "r": _RANK, "lora_alpha": _ALPHA, "use_rslora": either(FLAG, NULL), "use_dora": either(FLAG, NULL),
    "rank_pattern": _pattern_of(_RANK), "alpha_pattern": _pattern_of(_ALPHA), "target_modules": _NAMES,
    "exclude_modules": _NAMES, "modules_to_save": _NAMES, "layers_to_transform": _LAYERS, "layers_pattern": _NAMES,
    "fan_in_fan_out": either(FLAG, NULL), "bias": either(one_of("none", "all", "lora_only"), NULL),
    "base_model_name_or_path": either(TEXT, NULL), "ensure_weight_tying": either(FLAG, NULL),
}  # fmt: skip
"""What is read of the file."""

_TRAINING = frozenset((
    "peft_type", "auto_mapping", "revision", "task_type", "inference_mode", "lora_dropout", "init_lora_weights",
    "runtime_config", "peft_version", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core",
    "qalora_group_size", "kasa_config", "velora_config",
))  # fmt: skip
"""What concerns training alone, or only goes with a setting that is refused."""

_MERGE = "merge it into its base model with PEFT's merge_and_unload(), and serve the result"

_REFUSED = {
    "target_parameters": "adapters of experts that are stored as one stack are not supported; " + _MERGE,
    "trainable_token_indices": "single rows of an embedding cannot be replaced; " + _MERGE,
    "lora_bias": "a bias beside B is not supported; " + _MERGE,
    "layer_replication": "layers cannot be repeated; " + _MERGE,
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt is not supported",
    "use_qalora": "inputs that are pooled by group are not supported; " + _MERGE,
    "megatron_config": "Megatron's parallel layers are not supported; train it with PEFT's linear layers",
    "use_bdlora": "block-diagonal matrices are not supported; " + _MERGE,
}
"""Settings that change what an adapter computes, and what to do instead."""

_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Of `init_lora_weights`: what begins with one of these is trained over a base model that it has changed."""
_CONVERT = (
    "the adapter belongs to a base model that this has changed; save it again for the unchanged one with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=PATH_OF_THE_ADAPTER_AT_THE_BEGINNING), or merge it"
)


_TIED = ("embed_tokens", "lm_head", "wte")


@dataclass(frozen=True)
class PeftSettings:
    """What adapter_config.json says that matters after training; the names are PEFT's."""

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
        """The rank of a module's matrices."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What multiplies the product of a module's matrices."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def check_target(self, module: str) -> None:
        """Raises CheckpointError for a module whose matrices are stored although no setting asks for them.

        With `ensure_weight_tying` those of the head come with those of the embedding, and the other way around.
        """
        if self.ensure_weight_tying and module.endswith(_TIED):
            return
        if _matches(self.exclude_modules, module):
            raise CheckpointError(
                f"{self.path}: has matrices of {shown(module)}, but exclude_modules is {shown(self.exclude_modules)}"
            )
        if self.target_modules not in (None, ALL_LINEAR) and not _matches(self.target_modules, module):
            raise CheckpointError(
                f"{self.path}: has matrices of {shown(module)}, which target_modules does not name: it is "
                f"{shown(self.target_modules)}"
            )
        layer = _layer_number(module, self.layers_pattern) if self.layers_to_transform else None
        if layer is not None and layer not in self.layers_to_transform:
            raise CheckpointError(
                f"{self.path}: has matrices of {shown(module)}, but layers_to_transform is "
                f"{shown(self.layers_to_transform)}"
            )


def read_peft_settings(folder: Path) -> PeftSettings:
    """The folder's adapter_config.json.

    Raises:
        CheckpointError: it is missing or no JSON object, a key has an unexpected value, or it asks for something that
            is not supported.
    """
    given, path = read_object(folder, SETTINGS_FILE), folder / SETTINGS_FILE
    try:
        _check_supported(given)
        check_fields(given, _FIELDS)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    fields = {key: value for key in _FIELDS if (value := given.get(key)) is not None}
    for key in ("layers_to_transform", "layers_pattern", "modules_to_save"):
        if key in fields and not isinstance(fields[key], list):
            fields[key] = [fields[key]]
    settings = PeftSettings(path, **fields)
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern, *_expressions(settings)):
        _compiled(path, pattern)
    return settings


def _expressions(settings: PeftSettings) -> list[str]:
    """The settings that are regular expressions where they are a text."""
    texts = (settings.target_modules, settings.exclude_modules)
    return [text for text in texts if isinstance(text, str)] + settings.layers_pattern


def _compiled(path: Path, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{path}: {shown(pattern)} is no regular expression: {error}") from None


def _check_supported(given: dict[str, Any]) -> None:
    kind = given.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"peft_type is {shown(kind)}; accepted is 'LORA'")
    for key, why in _REFUSED.items():
        if given.get(key):
            raise CheckpointError(f"{key} is {shown(given[key])}: {why}")
    start = given.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(f"init_lora_weights is {shown(start)}: {_CONVERT}")
    known = _FIELDS.keys() | _REFUSED.keys() | _TRAINING
    for key in sorted(given.keys() - known):
        if given[key] not in (None, False, "", [], {}):
            raise CheckpointError(
                f"{shown(key)} is {shown(given[key])}, a setting that is not known here; if it concerns training "
                "alone, take it out of the file"
            )


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the whole name, or all that follows some dot of it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _matches(targets: str | list[str] | None, module: str) -> bool:
    """Whether a module is one of `targets`: names or ends of names, or one regular expression for the whole name."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def _layer_number(module: str, patterns: list[str]) -> int | None:
    """`model.layers.3.mlp.up_proj` -> 3; None for a module that is in no layer."""
    if not patterns:
        found = re.match(r".*\.[^.]*\.(\d+)\.", module)
    else:
        found = next(filter(None, (re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns)), None)
    return int(found[1]) if found else None
