"""JAX's profiler around some calls, and where its trace is."""

from __future__ import annotations

import os
from html import escape
from os import PathLike
from pathlib import Path
from typing import Self
from urllib.parse import quote

from jaxllm.errors import ConfigError, InvalidRequestError


class ProfilerTrace:
    """What the devices and the host do inside a `with` block, written for Perfetto and XProf; see `LLM.trace`."""

    def __init__(self, folder: str | PathLike[str]):
        self.folder = Path(folder)
        """What XProf opens."""
        self._found: Path | None = None

    @property
    def path(self) -> Path:
        """The file to open at https://ui.perfetto.dev.

        Raises:
            InvalidRequestError: the `with` block has not ended yet.
        """
        if self._found is None:
            raise InvalidRequestError("the trace is written when its with block has ended")
        return self._found

    def __enter__(self) -> Self:
        import jax

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder is {str(self.folder)!r}: {error.strerror}; it must be a folder") from None
        try:
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True)
        except RuntimeError as error:
            raise InvalidRequestError(f"no trace can be begun: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.profiler.stop_trace()
        written = self.folder.glob("plugins/profile/*/perfetto_trace.json.gz")
        self._found = max(written, key=lambda path: path.stat().st_mtime_ns)

    def __repr__(self) -> str:
        return f"ProfilerTrace({str(self._found or self.folder)!r}{'' if self._found else ', not written yet'})"

    def _repr_html_(self) -> str:
        if self._found is None:
            return escape(repr(self))
        link = quote(os.path.relpath(self._found))
        return (
            f'<a href="{link}" download>{escape(str(self._found))}</a>: to be opened at '
            '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener">ui.perfetto.dev</a>'
        )
