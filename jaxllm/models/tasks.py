"""The uses that a checkpoint and sentence-transformers' files beside it state: heads, pooling, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import msgspec

from jaxllm.errors import CheckpointError
from jaxllm.models.config import HeadActivation, Projection
from jaxllm.models.gguf import GgufFile
from jaxllm.models.hf_fields import COUNT, LENGTH, SIZE, maybe
from jaxllm.requests.outputs import Activation, ModelTasks, Pooling
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, OBJECT, TEXT, FieldKind, FieldKinds, check_fields, either, many, shown
from jaxllm.weights.folder import SentenceModule, model_file, read_object, read_text, sentence_modules

CLASSIFIER = "ForSequenceClassification"  # how the architecture of a checkpoint with a classification head ends

GGUF_HEAD = "cls.output.weight"  # the classification head of a GGUF file

DENSE_MODULES = ("dense_2.weight", "dense_3.weight")  # an encoder's projections in one

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
        file = GgufFile(checkpoint)
        return tuple(file("classifier.output_labels", [])) or _numbered(file.rows(GGUF_HEAD))
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
    """The tasks of `checkpoint`, from its config and from the files that sentence-transformers writes beside it.

    `encodes` says that its model is an encoder, whose texts are pooled by the mean where no file says how.

    Raises CheckpointError if it is an embedding model with a step that is not supported.
    """
    if checkpoint.format == "orbax":
        try:
            return msgspec.convert(checkpoint.config["tasks"], ModelTasks)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint.path}: tasks: {error}") from None
    labels = class_labels(checkpoint)
    usual: Pooling = "mean" if encodes else "last"
    if checkpoint.format == "gguf":
        return ModelTasks(
            pooling=gguf_pooling(checkpoint, usual), labels=labels,
            activation="sigmoid" if len(labels) == 1 else "softmax",
            judges_pairs=checkpoint.config["general.architecture"] == "qwen3" and set(labels) == {"yes", "no"},
            encodes=encodes, projects=encodes and DENSE_MODULES[0] in checkpoint.tensors,
        )  # fmt: skip
    c, files = checkpoint.config, read_sentence_files(checkpoint.path)
    return ModelTasks(
        pooling=files.pooling or usual, normalize="Normalize" in files.kinds or files.pooling is None, labels=labels,
        activation=_activation(c, len(labels)), judges_pairs=_is_reranker(checkpoint, files.kinds),
        longest_text=files.longest, encodes=encodes, projects=bool(files.projections), prompts=files.prompts,
        default_prompt=files.default_prompt,
    )  # fmt: skip


def longest_text(checkpoint: Checkpoint) -> int | None:
    """Tokens of the longest text that an encoder is to be given, where a file says so."""
    if checkpoint.format == "orbax":
        return read_tasks(checkpoint).longest_text
    return read_sentence_files(checkpoint.path).longest if checkpoint.format == "safetensors" else None


def gguf_pooling(checkpoint: Checkpoint, usual: Pooling) -> Pooling:
    """The pooling that a GGUF file states, or the `usual`."""
    return _GGUF_POOLING.get(GgufFile(checkpoint)("pooling_type", 0), usual)


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


_POOLING: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
}  # fmt: skip
_ORDER = (  # of the steps other than Dense, which come between Pooling and Normalize
    ["Transformer"], ["Transformer", "LogitScore"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"],
)  # fmt: skip
_KINDS_OF_BERT = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_DENSE_ACTIVATIONS: dict[str, HeadActivation] = {name: name for name in get_args(HeadActivation)}
_PROMPTS = FieldKind(
    "an object of names and texts",
    lambda value: isinstance(value, dict) and len(value) <= 64 and all(map(TEXT.fits, value.values())),
)


@dataclass(frozen=True)
class SentenceFiles:
    """The way from a text to a vector; where there are no such files, nothing is stated.

    Attributes:
        kinds: of the modules.
        pooling: None without a Pooling module.
        projections: each Dense module, and where its weights are: the checkpoint's tensors begin with that.
        longest: tokens of the longest text.
        prompts: what may be put before a text, by name.
        default_prompt: what is put before a text where nothing is asked for.
    """

    kinds: tuple[str, ...] = ()
    pooling: Pooling | None = None
    projections: tuple[tuple[str, Projection], ...] = ()
    longest: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_sentence_files(path: Path) -> SentenceFiles:
    """The files in a checkpoint's directory. Raises CheckpointError naming one that says something unsupported."""
    modules = sentence_modules(path)
    kinds = tuple(module.kind for module in modules)
    plain = [kind for kind in kinds if kind != "Dense"]
    after = kinds[kinds.index("Pooling") + 1 :] if "Pooling" in kinds else ()
    between = list(takewhile(lambda kind: kind == "Dense", after))
    if kinds and (plain not in _ORDER or kinds.count("Dense") != len(between)):
        raise CheckpointError(
            f"{path / 'modules.json'}: the modules are {', '.join(kinds)}; supported are Transformer, Pooling, any "
            "number of Dense, Normalize, in this order, or Transformer, LogitScore"
        )
    folder = next((module.folder for module in modules if module.kind == "Pooling"), None)
    prompts, default = _prompts(path)
    return SentenceFiles(
        kinds, None if folder is None else _pooling(path, f"{folder}/config.json"),
        tuple((module.folder, _dense(path, module)) for module in modules if module.kind == "Dense"), _longest(path),
        prompts, default,
    )  # fmt: skip


def _pooling(path: Path, name: str) -> Pooling:
    """`pooling_mode` of sentence-transformers 5, or the one flag of earlier versions that is true."""
    given, file = read_object(path, name), path / name
    if given.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt is false; accepted is true, since prompts are pooled with texts")
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


def _dense(path: Path, module: SentenceModule) -> Projection:
    name = f"{module.folder}/config.json"
    given, file = read_object(path, name), path / name
    check_fields(given, {"out_features": SIZE, "bias": FLAG, "activation_function": maybe(TEXT)}, f"{file}: ")
    if "out_features" not in given:
        raise CheckpointError(f"{file}: has no out_features, which is {SIZE.accepted}")
    stated = given.get("activation_function") or "torch.nn.modules.activation.Tanh"
    activation = _DENSE_ACTIVATIONS.get(stated.rpartition(".")[2].lower())
    if activation is None:
        raise CheckpointError(
            f"{file}: activation_function is {shown(stated)}; supported are {', '.join(_DENSE_ACTIVATIONS)}"
        )
    return Projection(given["out_features"], activation, given.get("bias", True))


def _longest(path: Path) -> int | None:
    names = (f"sentence_{kind}_config.json" for kind in _KINDS_OF_BERT)
    name = next((name for name in names if model_file(path, name).exists()), None)
    if name is None:
        return None
    given: dict[str, Any] = read_object(path, name)
    check_fields(given, {"max_seq_length": maybe(LENGTH), "do_lower_case": maybe(FLAG)}, f"{path / name}: ")
    if given.get("do_lower_case"):
        raise CheckpointError(
            f"{path / name}: do_lower_case is true; accepted is false, for that is the tokenizer's part"
        )
    return given.get("max_seq_length")


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    name = "config_sentence_transformers.json"
    if not model_file(path, name).exists():
        return {}, ""
    given = read_object(path, name)
    check_fields(given, {"prompts": maybe(_PROMPTS), "default_prompt_name": maybe(TEXT)}, f"{path / name}: ")
    prompts, default = given.get("prompts") or {}, given.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{path / name}: default_prompt_name is {shown(default)}; accepted are {', '.join(prompts) or 'no names'}"
        )
    return prompts, prompts.get(default, "") if default is not None else ""
