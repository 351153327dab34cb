"""What a checkpoint says of its use: a classification head, pooling, a reranker's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.errors import CheckpointError
from jaxllm.models.gguf import GgufFile
from jaxllm.models.hf_fields import COUNT, maybe
from jaxllm.models.sentence_files import read_sentence_files
from jaxllm.requests.tasks import Activation, ModelTasks, Pooling
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import OBJECT, TEXT, FieldKinds, check_fields, many, shown
from jaxllm.weights.folder import model_file, read_text

CLASSIFIER = "ForSequenceClassification"
"""How the architecture of a checkpoint with a classification head ends."""

GGUF_HEAD = "cls.output.weight"
"""The classification head of a GGUF file."""

DENSE_MODULES = ("dense_2.weight", "dense_3.weight")
"""An encoder's projections in one."""

RERANKER = "qwen3-reranker"

_GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
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


def class_labels(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the classes that the checkpoint's head tells apart; empty where it is a language model's head."""
    c = checkpoint.config
    if checkpoint.format == "gguf":
        if GGUF_HEAD not in checkpoint.tensors:
            return ()
        labels = GgufFile(checkpoint)("classifier.output_labels", [])
        return tuple(labels) or _numbered(GgufFile(checkpoint).rows(GGUF_HEAD))
    check_fields(c, _CLASSIFIER_FIELDS)
    if not any(name.endswith(CLASSIFIER) for name in c.get("architectures") or ()):
        return ()
    named = c.get("id2label")
    if named:
        if not all(isinstance(name, str) and number.isdecimal() for number, name in named.items()):
            raise CheckpointError(f"id2label is {shown(named)}; accepted is an object of number to name")
        return tuple(name for _, name in sorted(named.items(), key=lambda item: int(item[0])))
    return _numbered(c.get("num_labels", 2))  # transformers leaves two unnamed labels out of the file


def read_tasks(checkpoint: Checkpoint, encodes: bool = False) -> ModelTasks:
    """What `checkpoint` is made for, from its config and from the files that sentence-transformers writes beside it.

    `encodes` says that its model is an encoder, whose texts are pooled by the mean where no file says how.

    Raises:
        CheckpointError: it is an embedding model with a step that is not supported.
    """
    if checkpoint.format == "orbax":
        try:
            return msgspec.convert(checkpoint.config["tasks"], ModelTasks)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint.path}: tasks: {error}") from None
    labels = class_labels(checkpoint)
    usual: Pooling = "mean" if encodes else "last"
    if checkpoint.format == "gguf":
        return _gguf_tasks(checkpoint, labels, encodes, usual)
    c, files = checkpoint.config, read_sentence_files(checkpoint.path)
    return ModelTasks(
        pooling=files.pooling or usual,
        normalize="Normalize" in files.kinds or files.pooling is None,
        labels=labels,
        activation=_activation(c, len(labels)),
        judges_pairs=_is_reranker(checkpoint, files.kinds),
        longest_text=files.longest,
        encodes=encodes,
        projects=bool(files.projections),
        prompts=files.prompts,
        default_prompt=files.default_prompt,
    )


def longest_text(checkpoint: Checkpoint) -> int | None:
    """Tokens of the longest text that an encoder is to be given, where a file says so."""
    if checkpoint.format == "orbax":
        return read_tasks(checkpoint).longest_text
    return read_sentence_files(checkpoint.path).longest if checkpoint.format == "safetensors" else None


def gguf_pooling(checkpoint: Checkpoint, usual: Pooling) -> Pooling:
    """What stands for a text, as a GGUF file says, or the `usual`."""
    return _GGUF_POOLING.get(GgufFile(checkpoint)("pooling_type", 0), usual)


def _gguf_tasks(checkpoint: Checkpoint, labels: tuple[str, ...], encodes: bool, usual: Pooling) -> ModelTasks:
    kind = checkpoint.config["general.architecture"]
    pooling = gguf_pooling(checkpoint, usual)
    projects = encodes and DENSE_MODULES[0] in checkpoint.tensors
    activation: Activation = "sigmoid" if len(labels) == 1 else "softmax"
    judge = kind == "qwen3" and set(labels) == {"yes", "no"}
    return ModelTasks(
        pooling=pooling, labels=labels, activation=activation, judges_pairs=judge, encodes=encodes, projects=projects
    )


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


def _is_reranker(checkpoint: Checkpoint, modules: Sequence[str]) -> bool:
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
