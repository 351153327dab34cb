"""Files from the Hugging Face hub, or from whatever HF_ENDPOINT names; an unreachable hub costs seconds."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Copies of the same weights in other layouts, which some repositories hold beside the ones read here.
_OTHER_LAYOUTS = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")

CONNECT_TIMEOUT = 3.0  # seconds


class HubError(Exception):
    """The hub is unreachable, switched off, or does not have what was asked for; one line."""


def hub_file(repo: str, file: str, revision: str | None, *, local_dir: Path | None = None) -> Path:
    """One file of a repository, in the hub's own cache or under `local_dir`. Raises HubError."""
    from huggingface_hub import hf_hub_download

    return _call(hf_hub_download, repo, file, revision=revision, local_dir=local_dir)


def hub_snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The files of a repository that match `patterns`, in the hub's own cache. Raises HubError."""
    from huggingface_hub import snapshot_download

    return _call(
        snapshot_download, repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_OTHER_LAYOUTS)
    )


def _call(download: Callable[..., str], repo: str, *args: Any, **options: Any) -> Path:
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
        raise HubError(f"{away or _first_line(error)}, and {repo} is not in the hub's cache") from None
    except errors.GatedRepoError:
        raise HubError(f"{repo} is gated: accept its terms on the hub and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{endpoint} has no repository {repo} (or it is private: log in with `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{repo} has no revision {options.get('revision')!r}") from None
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise HubError(f"{repo}: {_first_line(error)}") from None
    if away:
        logger.warning("%s; using the cached copy of %s", away, repo)
    return Path(path)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _why_away(endpoint: str) -> str | None:
    """None when the hub answers. The probe bounds the wait: the hub's client would retry, and DNS has no timeout."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    outcome: list[str] = []
    probe = threading.Thread(target=_probe, args=(endpoint, outcome), daemon=True)
    probe.start()
    probe.join(CONNECT_TIMEOUT + 1)
    if not outcome:
        return f"{endpoint} did not answer within {CONNECT_TIMEOUT:.0f} s"
    return outcome[0] or None


def _probe(endpoint: str, outcome: list[str]) -> None:
    import httpx

    try:
        httpx.head(endpoint, timeout=CONNECT_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        outcome.append(f"{endpoint} cannot be reached ({_first_line(error)})")
    else:
        outcome.append("")
