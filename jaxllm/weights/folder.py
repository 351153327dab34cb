"""The files of a model's folder, written by whoever published the model: nothing here is taken on trust.

A GGUF model is one file, or the parts that gguf-split makes of it, NAME-00001-of-00003.gguf and so on, of which the
first has the metadata. generation_config.json recommends how to sample; modules.json lists the steps by which
sentence-transformers makes a vector of a text.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, one_line
from jaxllm.machine import memory
from jaxllm.weights.fields import NULL, TEXT, FieldKinds, check_fields, either, many, real, shown, whole
from jaxllm.wording import kind_of

MAX_TEXT_BYTES = 2**28  # the limit for one JSON file or template; the largest published tokenizer.json have 40 MB
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # files of PyTorch, which run their author's code when they are read
NO_PICKLES = "pickle files can run code and are not read; convert it to safetensors (`save_pretrained`) or GGUF"

MANIFEST = "jaxllm.json"  # the file that marks a directory made by `jaxllm convert`; see `jaxllm.weights.saved`


def model_file(folder: Path, name: str) -> Path:
    """`folder / name`, which need not exist.

    Raises CheckpointError if it lies outside of `folder`, by its name or through a symbolic link (links into the
    `blobs` of the hub's cache are followed), or is neither a file nor a folder, such as a pipe, which may never end.
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
    """Raises CheckpointError for a pipe, a socket or a device."""
    if os.path.exists(file) and not (file.is_file() or file.is_dir()):  # Path.exists raises for a name too long
        raise CheckpointError(f"{one_line(file)}: is a pipe, a socket or a device; it must be a file")


def read_text(folder: Path, name: str, errors: str = "strict") -> str:
    """A text file of the folder. Raises CheckpointError if it is outside, too large, or (if strict) not UTF-8."""
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
    """The value in a JSON file of the folder. Raises CheckpointError if it is outside, too large, or not JSON."""
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
    return sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that the file `name` belongs to; the name alone if it is not split."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def whole_name(path: Path) -> Path:
    """The place of the model if it were not split: NAME.gguf for NAME-00001-of-00003.gguf."""
    found = _PART.fullmatch(path.name)
    return path if found is None else path.with_name(f"{found[1]}.gguf")


def part_files(path: Path) -> list[Path]:
    """All parts of a model in order, from any of them. Raises CheckpointError if one is missing or outside."""
    names = part_names(path.name)
    files = [path if name == path.name else model_file(path.parent, name) for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        others = f" and {len(missing) - 1} more of its {len(files)} parts" if len(missing) > 1 else ""
        raise CheckpointError(f"{path}: the part {missing[0]}{others} is missing from {path.parent}")
    return files


def gguf_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder, each as its file or its first part, which may be missing."""
    return sorted({file.with_name(part_names(file.name)[0]) for file in folder.glob("*.gguf")})


def the_gguf_file(path: Path) -> Path:
    """The first part of a GGUF model: of that which the file `path` belongs to, or of the one in the directory `path`.

    Raises CheckpointError if there is not exactly one, or a part is missing.
    """
    if path.is_file():
        return part_files(path)[0]
    files = gguf_models(path)
    if len(files) != 1:
        held = ", ".join(file.name for file in files) or "none"
        if not files and (found := pickles(path)):
            held = f"{', '.join(found[:3])}: {NO_PICKLES}"
        raise CheckpointError(
            f"{path}: needs config.json and *.safetensors, or exactly one .gguf file; it holds {held}"
        )
    return part_files(model_file(path, files[0].name))[0]


TOKEN_ID = whole(0, 2**31 - 1)
EOS_FIELDS: FieldKinds = {"eos_token_id": either(TOKEN_ID, many(TOKEN_ID, 1024), NULL)}  # config.json has it too
SAMPLING_FIELDS: FieldKinds = {  # recommended sampling parameters
    "temperature": either(real(0, 1e3), NULL),
    "top_p": either(real(1e-6, 1), NULL),
    "top_k": either(whole(-1, 2**31 - 1), NULL),
    "min_p": either(real(0, 1), NULL),
    "repetition_penalty": either(real(1e-6, 1e3), NULL),
    "repeat_last_n": either(whole(-1, 2**31 - 1), NULL),
}


def generation_config_of(path: Path) -> Path:
    """The file that wins over a GGUF's sampling defaults: MODEL.generation_config.json for MODEL.gguf, split or not."""
    return whole_name(path).with_suffix(".generation_config.json")


def read_generation_config(folder: Path, name: str = "generation_config.json") -> dict[str, Any]:
    """The file's content; empty if there is none. Raises CheckpointError naming a field that is wrong."""
    if not model_file(folder, name).exists():
        return {}
    given = read_object(folder, name)
    check_fields(given, EOS_FIELDS | SAMPLING_FIELDS, f"{folder / name}: ")
    return given


SENTENCE_KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")


class SentenceModule(NamedTuple):
    """One step: its class without the module that it is in, and its folder."""

    kind: str
    folder: str

    @property
    def weights(self) -> str:
        """The file with the weights of a step that has some of its own."""
        return f"{self.folder}/model.safetensors"


def sentence_modules(path: Path) -> list[SentenceModule]:
    """The steps of a sentence-transformers directory, if it is one. Raises CheckpointError for unsupported ones."""
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
        if kind not in SENTENCE_KINDS:
            raise CheckpointError(f"{file}: has a module {shown(kind)}; supported are {', '.join(SENTENCE_KINDS)}")
    return modules


CHUNK = 2**20  # bytes read at once, into one buffer: the operating system keeps them


@contextmanager
def reading_ahead(path: Path) -> Iterator[None]:
    """Read a checkpoint's file and its other parts, or all files of its folder, in a thread that ends with the block.

    It stops at half of the free memory, so that nothing in use is evicted, and skips files that the loader will report.
    """
    files = files_of(path)
    left, ended = memory().available // 2, threading.Event()

    def read() -> None:
        buffer, budget = bytearray(CHUNK), left
        for name in files:
            try:
                with open(name, "rb", buffering=0) as file:
                    while budget > 0 and not ended.is_set() and (count := file.readinto(buffer)):
                        budget -= count
            except OSError:  # the loader meets it again and names it
                continue

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def files_of(path: Path) -> list[Path]:
    """A checkpoint's file and its other parts, or all files of its folder."""
    return part_files(path) if path.is_file() else sorted(_files_in(path))


def _files_in(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        try:
            if model_file(folder, str(file.relative_to(folder))).is_file():
                yield file
        except CheckpointError:  # a link that leads out of the folder is not followed here either
            continue
