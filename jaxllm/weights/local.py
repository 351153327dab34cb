"""The models that are on this machine already: built-in ones in our cache, and repositories in the hub's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.errors import ModelNotFoundError
from jaxllm.folders import existing
from jaxllm.weights.source import BUILTIN_MODELS, list_builtin_models

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


class LocalModel(NamedTuple):
    """`path` is what is loaded, None of a built-in model that is not here yet; `nbytes` is what all of it takes."""

    name: str
    nbytes: int
    path: Path | None
    about: str


def list_local_models(download_dir: Path | None = None) -> list[LocalModel]:
    """The built-in models, fetched or not, then what the hub's cache has: a .gguf file by itself is a model."""
    built_in = [LocalModel(row.name, row.nbytes, row.path, row.about) for row in list_builtin_models(download_dir)]
    return built_in + sorted(_hub_models())


def find_local(name: str, download_dir: Path | None = None) -> LocalModel:
    """A model of that list, or a file or folder. Raises ModelNotFoundError; nothing is fetched."""
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
    """A model that `remove_local` would delete; raises ModelNotFoundError as that does."""
    model = find_local(name, download_dir)
    if name not in BUILTIN_MODELS and _cached_repository(name.partition(":")[0]) is None:
        raise ModelNotFoundError(f"model {name!r} is a file or folder of yours: only what was downloaded is removed")
    return model


def _cached_repository(repo: str) -> CachedRepoInfo | None:
    cached = _hub_cache()
    kept = cached.repos if cached is not None else ()
    return next((one for one in kept if one.repo_id == repo and one.repo_type == "model"), None)


def remove_local(name: str, download_dir: Path | None = None) -> LocalModel:
    """Delete a model from the cache that it is in, and return what it was.

    Raises ModelNotFoundError: it is in no cache, or is a file or folder of the user's own.
    """
    model = find_removable(name, download_dir)
    assert model.path is not None
    if name in BUILTIN_MODELS:
        shutil.rmtree(model.path.parent)
        return model
    repo, _, file = name.partition(":")
    found = _cached_repository(repo)
    assert found is not None
    if file:
        model.path.resolve().unlink()
        model.path.unlink()
        return model
    # Not by the library's `delete_revisions`, which looks for commits alone: a copy of a repository has the same ones.
    shutil.rmtree(found.repo_path)
    return model


def _hub_models() -> list[LocalModel]:
    cached = _hub_cache()
    models = []
    for repo in cached.repos if cached is not None else ():
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type != "model" or newest is None:
            continue
        ggufs = [file for file in newest.files if file.file_name.endswith(".gguf")]
        for file in ggufs:
            models.append(LocalModel(f"{repo.repo_id}:{file.file_name}", file.size_on_disk, file.file_path, "hub"))
        if any(file.file_name.endswith(".safetensors") for file in newest.files):
            models.append(LocalModel(repo.repo_id, repo.size_on_disk, newest.snapshot_path, "hub"))
    return models


def _hub_cache():  # type: ignore[no-untyped-def]  # a class of huggingface_hub, which is imported where it is needed
    """What the hub's library has kept; None where there is no such folder yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None
