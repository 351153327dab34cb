"""The files of a model's folder, which whoever published the model has written: nothing here is taken on trust."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, one_line
from jaxllm.weights.fields import shown
from jaxllm.wording import kind_of

MAX_TEXT_BYTES = 2**28
"""Of one JSON file or template; the largest published tokenizer.json have 40 MB."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Files of PyTorch, which run code of their author's when they are read."""
NO_PICKLES = "pickle files can run code and are not read; convert it to safetensors (`save_pretrained`) or GGUF"

MANIFEST = "jaxllm.json"
"""Of a directory that `jaxllm convert` made; see `jaxllm.weights.saved`."""


def model_file(folder: Path, name: str) -> Path:
    """`folder / name`, which need not exist.

    Raises:
        CheckpointError: it lies outside of `folder`, by its name or through a symbolic link. Links into the `blobs` of
            the hub's cache are how that cache is made, and are followed. Or it is neither a file nor a folder: a pipe
            that nobody writes into would be waited for without end.
    """
    if "\0" in name:
        raise CheckpointError(f"{folder}: {shown(name)} is no name of a file")
    file, root = folder / name, Path(os.path.realpath(folder))
    target = Path(os.path.realpath(file))
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (root, *blobs)):
        raise CheckpointError(f"{folder}: {shown(name)} leads out of the model's folder; copy the file there")
    check_no_device(file)
    return file


def check_no_device(file: Path) -> None:
    """Raises CheckpointError for a pipe, a socket or a device, which cannot be read at any place and may never end."""
    if os.path.exists(file) and not (file.is_file() or file.is_dir()):  # Path.exists raises for a name too long
        raise CheckpointError(f"{one_line(file)}: is a pipe, a socket or a device; it must be a file")


def read_text(folder: Path, name: str, errors: str = "strict") -> str:
    """A text file of the folder. Raises CheckpointError when it is outside, too large, or (if strict) not UTF-8."""
    file = model_file(folder, name)
    try:
        if not file.is_file():
            raise CheckpointError(f"{one_line(folder)}: holds no {one_line(name)}")
        if (size := file.stat().st_size) > MAX_TEXT_BYTES:
            raise CheckpointError(f"{file}: has {size:,} bytes; accepted are {MAX_TEXT_BYTES:,}")
        return file.read_text(encoding="utf-8-sig", errors=errors)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{one_line(file)}: not readable as text: {one_line(reason)}") from None


def read_json(folder: Path, name: str) -> Any:
    """The value in a JSON file of the folder. Raises CheckpointError when it is outside, too large, or not JSON."""
    text = read_text(folder, name)
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair can be written in JSON, and nowhere else
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / name}: not readable as JSON: {error}") from None


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder. Raises CheckpointError as `read_json`, and for anything else."""
    value = read_json(folder, name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name}: holds {kind_of(value)}, not an object")
    return value


def is_saved(path: Path) -> bool:
    """Whether a directory was made by `jaxllm convert --to orbax`."""
    return (path / MANIFEST).exists()


def pickles(folder: Path) -> list[str]:
    """Names of the folder's pickle files."""
    return sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
