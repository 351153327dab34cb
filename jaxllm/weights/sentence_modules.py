"""The steps that sentence-transformers takes with a text, as modules.json beside a checkpoint lists them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxllm.errors import CheckpointError
from jaxllm.weights.fields import TEXT, shown
from jaxllm.weights.folder import model_file, read_json

KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")


class SentenceModule(NamedTuple):
    """One step: its class without the module that it is in, and its folder."""

    kind: str
    folder: str

    @property
    def weights(self) -> str:
        """The file with the weights of a step that has some of its own."""
        return f"{self.folder}/model.safetensors"


def sentence_modules(path: Path) -> list[SentenceModule]:
    """Each step in order; none where the directory is not one of sentence-transformers'.

    Raises:
        CheckpointError: a step is not supported.
    """
    file = model_file(path, "modules.json")
    if not file.exists():
        return []
    given = read_json(path, file.name)
    if not isinstance(given, list) or not all(
        isinstance(entry, dict) and TEXT.fits(entry.get("type")) and TEXT.fits(entry.get("path")) for entry in given
    ):
        raise CheckpointError(f"{file}: is {shown(given)}; accepted is a list of objects with a type and a path")
    modules = [SentenceModule(entry["type"].rpartition(".")[2], entry["path"]) for entry in given]
    for kind, _ in modules:
        if kind not in KINDS:
            raise CheckpointError(f"{file}: has a module {shown(kind)}; supported are {', '.join(KINDS)}")
    return modules
