"""What a checkpoint says of its use: a classification head, pooling, a reranker's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from jaxllm.errors import CheckpointError
from jaxllm.models.gguf import Metadata, gguf_rows
from jaxllm.models.hf_fields import COUNT, maybe
from jaxllm.requests.tasks import Activation, ModelTasks, Pooling
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import OBJECT, TEXT, FieldKinds, check_fields, either, many, shown
from jaxllm.weights.folder import model_file, read_json, read_object, read_text

CLASSIFIER = "ForSequenceClassification"
"""How the architecture of a checkpoint with a classification head ends."""

GGUF_HEAD = "cls.output.weight"
"""The classification head of a GGUF file."""

RERANKER = "qwen3-reranker"

_GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_POOLING: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
}  # fmt: skip
_ACTIVATIONS: dict[str | None, Activation] = {
    "single_label_classification": "softmax", "multi_label_classification": "sigmoid", "regression": "identity",
}  # fmt: skip
_CLASSIFIER_FIELDS: FieldKinds = {
    "architectures": maybe(many(TEXT, 64)),
    "id2label": maybe(OBJECT),
    "num_labels": COUNT,
    "problem_type": maybe(TEXT),
    "sentence_transformers": maybe(OBJECT),
    "sbert_ce_default_activation_function": maybe(TEXT),
}
_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")


def class_labels(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the classes that the checkpoint's head tells apart; empty where it is a language model's head."""
    c = checkpoint.config
    if checkpoint.format == "gguf":
        if GGUF_HEAD not in checkpoint.tensors:
            return ()
        labels = Metadata(checkpoint)("classifier.output_labels", [])
        return tuple(labels) or _numbered(gguf_rows(checkpoint, GGUF_HEAD))
    check_fields(c, _CLASSIFIER_FIELDS)
    if not any(name.endswith(CLASSIFIER) for name in c.get("architectures") or ()):
        return ()
    named = c.get("id2label")
    if named:
        if not all(isinstance(name, str) and number.isdecimal() for number, name in named.items()):
            raise CheckpointError(f"id2label is {shown(named)}; accepted is an object of number to name")
        return tuple(name for _, name in sorted(named.items(), key=lambda item: int(item[0])))
    return _numbered(c.get("num_labels", 2))  # transformers leaves two unnamed labels out of the file


def read_tasks(checkpoint: Checkpoint) -> ModelTasks:
    """What `checkpoint` is made for, from its config and from the files that sentence-transformers writes beside it.

    Raises:
        CheckpointError: it is an embedding model with a step that is not supported.
    """
    if checkpoint.format == "orbax":
        try:
            return msgspec.convert(checkpoint.config["tasks"], ModelTasks)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint.path}: tasks: {error}") from None
    labels = class_labels(checkpoint)
    if checkpoint.format == "gguf":
        return _gguf_tasks(checkpoint, labels)
    path, c = checkpoint.path, checkpoint.config
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    folder = next((folder for kind, folder in modules if kind == "Pooling"), None)
    return ModelTasks(
        pooling=_pooling(path, f"{folder}/config.json") if folder is not None else "last",
        normalize="Normalize" in kinds or folder is None,
        labels=labels,
        activation=_activation(c, len(labels)),
        judges_pairs=_is_reranker(checkpoint, kinds),
    )


def _gguf_tasks(checkpoint: Checkpoint, labels: tuple[str, ...]) -> ModelTasks:
    c = checkpoint.config
    kind = c["general.architecture"]
    pooling = _GGUF_POOLING.get(Metadata(checkpoint)("pooling_type", 0), "last")
    activation: Activation = "sigmoid" if len(labels) == 1 else "softmax"
    judge = kind == "qwen3" and set(labels) == {"yes", "no"}
    return ModelTasks(pooling=pooling, labels=labels, activation=activation, judges_pairs=judge)


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each step that sentence-transformers takes; none where the directory is not one of its."""
    file = model_file(path, "modules.json")
    if not file.exists():
        return []
    given = read_json(path, file.name)
    if not isinstance(given, list) or not all(
        isinstance(entry, dict) and TEXT.fits(entry.get("type")) and TEXT.fits(entry.get("path")) for entry in given
    ):
        raise CheckpointError(f"{file}: is {shown(given)}; accepted is a list of objects with a type and a path")
    modules = [(entry["type"].rpartition(".")[2], entry["path"]) for entry in given]
    for kind, _ in modules:
        if kind not in _MODULES:
            raise CheckpointError(f"{file}: has a module {shown(kind)}; supported are {', '.join(_MODULES)}")
    return modules


def _pooling(path: Path, name: str) -> Pooling:
    """`pooling_mode` of sentence-transformers 5, or the one flag of earlier versions that is true."""
    given, file = read_object(path, name), path / name
    if "pooling_mode" in given:
        check_fields(given, {"pooling_mode": either(TEXT, many(TEXT, 16))}, f"{file}: ")
        modes = [given["pooling_mode"]] if isinstance(given["pooling_mode"], str) else given["pooling_mode"]
        known: dict[str, Pooling] = _POOLING
    else:
        modes = [flag for flag, value in given.items() if flag.startswith("pooling_mode_") and value is True]
        known = _POOLING_FLAGS
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(f"{file}: pools by {shown(modes)}; supported is one of {', '.join(known)}")
    return known[modes[0]]


def _activation(c: dict[str, Any], count: int) -> Activation:
    """`problem_type`, or what transformers infers where it is absent; a cross-encoder's own choice comes first."""
    chosen = (c.get("sentence_transformers") or {}).get("activation_fn") or c.get(
        "sbert_ce_default_activation_function"
    )
    if chosen:
        check_fields({"the activation": chosen}, {"the activation": TEXT})
        name = chosen.rpartition(".")[2].lower()
        if name not in ("sigmoid", "identity", "softmax"):
            raise CheckpointError(f"the activation is {shown(chosen)}; supported are Sigmoid, Identity and Softmax")
        return name
    return _ACTIVATIONS.get(c.get("problem_type"), "sigmoid" if count == 1 else "softmax")


def _is_reranker(checkpoint: Checkpoint, modules: list[str]) -> bool:
    """Qwen3-Reranker has the config of any Qwen 3: told by a module of its own, vLLM's flag, its card or its name."""
    if checkpoint.config.get("model_type") != "qwen3":
        return False
    if "LogitScore" in modules or checkpoint.config.get("is_original_qwen3_reranker"):
        return True
    has_card = model_file(checkpoint.path, "README.md").exists()
    if has_card and f"# {RERANKER}" in read_text(checkpoint.path, "README.md", errors="replace").lower():
        return True
    return any(RERANKER in part.lower() for part in checkpoint.path.parts)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{i}" for i in range(count))
