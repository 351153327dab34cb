"""The files of a batch while it runs: its input, and every result so far, appended as it comes."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from filelock import FileLock

from jaxllm.serving.batches.stores import link_or_copy
from jaxllm.serving.batches.types import LineResult
from jaxllm.serving.http.api_error import telling_full

_attempt_decoder = msgspec.json.Decoder(tuple[Literal["started", "released"], str])


@dataclass
class Tally:
    """Sums over the results of a batch, under the names of BatchRow's columns."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, result: LineResult) -> None:
        if not succeeded(result):
            self.failed += 1
            return
        assert result.response is not None
        self.completed += 1
        usage = msgspec.json.decode(result.response.body).get("usage") or {}
        self.input_tokens += _count(usage, "prompt_tokens", "input_tokens")
        self.output_tokens += _count(usage, "completion_tokens", "output_tokens")
        for name, detail in (("prompt", "input"), ("completion", "output")):
            details = usage.get(f"{name}_tokens_details") or usage.get(f"{detail}_tokens_details") or {}
            self.cached_tokens += _count(details, "cached_tokens")
            self.reasoning_tokens += _count(details, "reasoning_tokens")


@dataclass
class Progress:
    """The contents of a journal: the lines that are done, their sums, and how often a crash met each of the others."""

    done: set[str] = field(default_factory=set)
    crashes: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)


class Journal:
    """A directory `batches/ID`. A result is there when `append` returns, whatever happens to the machine then.

    Blocking. What finds no room raises StorageFullError and leaves nothing of it, so that it may be tried again.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self.input = directory / "input.jsonl"
        self.output = directory / "output.jsonl"
        self.errors = directory / "errors.jsonl"
        self._attempts = directory / "attempts.jsonl"
        self._writing = threading.Lock()

    def begin(self, input_file: Path) -> None:
        """Keep the input, so that deleting the uploaded file does not touch the batch."""
        link_or_copy(input_file, self.input)

    @property
    def exists(self) -> bool:
        return self._directory.is_dir()

    def lock(self) -> FileLock:
        """Held by the one server that runs the batch; the system releases it when that server dies."""
        return FileLock(self._directory / "lock", blocking=False)

    def start(self, custom_id: str) -> None:
        """Note that a line is about to run: if it is neither done nor released by the next start, a crash met it."""
        self._note("started", [custom_id])

    def release(self, custom_ids: Iterable[str]) -> None:
        """Note that lines were stopped through no fault of theirs."""
        self._note("released", custom_ids)

    def _note(self, what: str, custom_ids: Iterable[str]) -> None:
        self._append({self._attempts: [msgspec.json.encode((what, custom_id)) + b"\n" for custom_id in custom_ids]})

    def append(self, results: Iterable[LineResult]) -> None:
        """Write answers to the output, everything else to the errors."""
        lines: dict[Path, list[bytes]] = {self.output: [], self.errors: []}
        for result in results:
            path = self.output if succeeded(result) else self.errors
            lines[path].append(msgspec.json.encode(result) + b"\n")
        self._append(lines, synced=True)

    def _append(self, lines: Mapping[Path, Sequence[bytes]], *, synced: bool = False) -> None:
        with self._writing, telling_full():
            sizes = {path: path.stat().st_size if path.exists() else 0 for path in lines}
            try:
                for path, encoded in lines.items():
                    if encoded:
                        _append_to(path, b"".join(encoded), synced=synced)
            except OSError:
                for path, size in sizes.items():
                    if path.exists():
                        os.truncate(path, size)
                raise

    def recover(self) -> Progress:
        """Read the results back, cutting off a line that a crash left half written."""
        progress = Progress()
        for path in (self.output, self.errors):
            for line in _whole_lines(path):
                result = msgspec.json.decode(line, type=LineResult)
                progress.done.add(result.custom_id)
                progress.tally.add(result)
        for line in _whole_lines(self._attempts):
            what, custom_id = _attempt_decoder.decode(line)
            if custom_id not in progress.done:
                progress.crashes[custom_id] += 1 if what == "started" else -1
        return progress

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _append_to(path: Path, content: bytes, *, synced: bool) -> None:
    with path.open("ab") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())


def succeeded(result: LineResult) -> bool:
    return result.response is not None and result.response.status_code < 400


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield line
        file.truncate(whole)


def _count(usage: dict[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if usage.get(name)), 0)
