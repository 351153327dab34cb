"""What sentence-transformers' files beside a checkpoint say of how a text becomes a vector."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from jaxllm.errors import CheckpointError
from jaxllm.models.hf_fields import LENGTH, SIZE, maybe
from jaxllm.models.layers.encoder import HeadActivation, Projection
from jaxllm.requests.tasks import Pooling
from jaxllm.weights.fields import FLAG, TEXT, FieldKind, check_fields, either, many, shown
from jaxllm.weights.folder import SentenceModule, model_file, read_object, sentence_modules

_POOLING: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
}  # fmt: skip
_ORDER = (
    ["Transformer"], ["Transformer", "LogitScore"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"],
)  # fmt: skip
"""Of the steps other than Dense, which come between Pooling and Normalize."""
_KINDS_OF_BERT = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_ACTIVATIONS: dict[str, HeadActivation] = {name: name for name in get_args(HeadActivation)}
_PROMPTS = FieldKind(
    "an object of names and texts",
    lambda value: isinstance(value, dict) and len(value) <= 64 and all(map(TEXT.fits, value.values())),
)


@dataclass(frozen=True)
class SentenceFiles:
    """How a text becomes a vector; where there are no such files, nothing is said.

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
    """Of the directory of a checkpoint.

    Raises:
        CheckpointError: a file says something that is not supported; it is named.
    """
    modules = sentence_modules(path)
    kinds = tuple(module.kind for module in modules)
    plain = [kind for kind in kinds if kind != "Dense"]
    if kinds and (plain not in _ORDER or kinds.count("Dense") != len(_between(kinds))):
        raise CheckpointError(
            f"{path / 'modules.json'}: the modules are {', '.join(kinds)}; supported are Transformer, Pooling, any "
            "number of Dense, Normalize, in this order, or Transformer, LogitScore"
        )
    folder = next((module.folder for module in modules if module.kind == "Pooling"), None)
    prompts, default = _prompts(path)
    return SentenceFiles(
        kinds,
        None if folder is None else _pooling(path, f"{folder}/config.json"),
        tuple((module.folder, _dense(path, module)) for module in modules if module.kind == "Dense"),
        _longest(path),
        prompts,
        default,
    )


def _between(kinds: tuple[str, ...]) -> list[str]:
    """The Dense modules that directly follow Pooling."""
    found = []
    for kind in kinds[kinds.index("Pooling") + 1 :] if "Pooling" in kinds else ():
        if kind != "Dense":
            break
        found.append(kind)
    return found


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
    activation = _ACTIVATIONS.get(stated.rpartition(".")[2].lower())
    if activation is None:
        raise CheckpointError(
            f"{file}: activation_function is {shown(stated)}; supported are {', '.join(_ACTIVATIONS)}"
        )
    return Projection(given["out_features"], activation, given.get("bias", True))


def _longest(path: Path) -> int | None:
    """`max_seq_length` of whichever of its names the file has."""
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
