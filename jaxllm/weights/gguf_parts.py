"""The files of one GGUF model: one, or the parts that gguf-split makes of it, NAME-00001-of-00003.gguf and so on.

The first part has the metadata; each has some of the tensors, and says which part it is (`split.no`, from 0), of how
many (`split.count`), and how many tensors all of them have (`split.tensors.count`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import CheckpointError
from jaxllm.weights.folder import model_file
from jaxllm.weights.gguf_header import GGUFHeader

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that the file `name` is a part of; the name alone if it is none."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def whole_name(path: Path) -> Path:
    """Where the model would be if it were not split: NAME.gguf for NAME-00001-of-00003.gguf."""
    found = _PART.fullmatch(path.name)
    return path if found is None else path.with_name(f"{found[1]}.gguf")


def part_files(path: Path) -> list[Path]:
    """All parts of a model, the first one first, from any of them.

    Raises:
        CheckpointError: a part is missing, or lies outside of the folder.
    """
    names = part_names(path.name)
    files = [path if name == path.name else model_file(path.parent, name) for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        others = f" and {len(missing) - 1} more of its {len(files)} parts" if len(missing) > 1 else ""
        raise CheckpointError(f"{path}: the part {missing[0]}{others} is missing from {path.parent}")
    return files


def gguf_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder, each as its file or its first part, which may be missing."""
    return sorted({file.with_name(part_names(file.name)[0]) for file in folder.glob("*.gguf")})


def check_parts(files: Sequence[Path], headers: Sequence[GGUFHeader]) -> None:
    """Raises CheckpointError for files that are not the parts of one model, all of them and in this order."""
    tensors = [name for header in headers for name in header.tensors]
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        count = header.metadata.get("split.count", 1)
        if count > 1 and len(files) == 1:
            raise CheckpointError(
                f"{file}: one of {count} parts of a split GGUF, which must keep the name that gguf-split gave it: "
                f"NAME-00001-of-{count:05}.gguf"
            )
        if len(files) == 1:
            return
        expected = {"split.count": len(files), "split.no": number, "split.tensors.count": stated}
        for key, value in expected.items():
            if (found := header.metadata.get(key)) != value:
                shown = "missing" if found is None else found
                raise CheckpointError(f"{file}: {key} is {shown}; {value} is expected: it is no part of this model")
    if stated != len(tensors):
        raise CheckpointError(
            f"{files[0]}: split.tensors.count is {stated}, but its {len(files)} parts have {len(tensors)} tensors: "
            "they are parts of several models"
        )
    twice = [name for name, times in Counter(tensors).items() if times > 1]
    if twice:
        raise CheckpointError(f"{files[0]}: tensor {twice[0]!r} is in several parts: they are parts of several models")
