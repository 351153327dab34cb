"""From one checkpoint to another: with adapters merged, quantized, laid out for the engine, or for other programs."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxllm.cli.convert.packed import write_gguf, write_orbax
from jaxllm.cli.convert.safetensors import write_safetensors
from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.folders import existing, in_home
from jaxllm.models.names import hf_renaming
from jaxllm.models.registry import adapter_names, model_spec
from jaxllm.progress import Progress
from jaxllm.quantization.schemes import SCHEMES
from jaxllm.weights import open_checkpoint
from jaxllm.weights.adapters import Adapter, LowRank, open_adapter
from jaxllm.weights.checkpoint import Checkpoint, Edit, MergedCheckpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.folder import part_files
from jaxllm.weights.names import Source, plus_one, transposed
from jaxllm.weights.saved import kind_name
from jaxllm.weights.source import resolve_model

TargetFormat = Literal["orbax", "safetensors", "gguf"]


@under_own_settings
def convert_model(
    config: EngineConfig,
    destination: Path,
    to: TargetFormat,
    on_progress: Progress | None = None,
    merge_lora: Sequence[str] = (),
) -> list[str]:
    """Write `config.model`, with adapters merged, to `destination`, or nothing. Returns what was done, in lines.

    Raises:
        ConfigError, CheckpointError: it cannot be done.
    """
    write = {"orbax": write_orbax, "safetensors": write_safetensors, "gguf": write_gguf}[to]
    if to != "gguf" and destination.suffix == ".gguf":
        raise ConfigError(
            f"destination is {str(destination)!r}, and --to {to} writes a directory; --to gguf writes a file"
        )
    if to == "gguf" and destination.suffix != ".gguf":
        raise ConfigError(f"destination is {str(destination)!r}; --to gguf writes a file, whose name ends in .gguf")
    adapters = [MergedAdapter.parse(text) for text in merge_lora]
    source = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    with new_destination(destination, source) as target:
        checkpoint = open_model(config, source)
        try:
            write(config, with_adapters(checkpoint, adapters), target, on_progress)
        finally:
            checkpoint.close()
    return _said(config.isq, stored_in(source), stored_in(destination))


class StoredSize(NamedTuple):
    """The files of a model: their bytes, and how many numbers are kept as what, the most first."""

    nbytes: int
    kinds: dict[str, int]

    def share(self, kind: str) -> float:
        return self.kinds.get(kind, 0) / max(sum(self.kinds.values()), 1)

    def __str__(self) -> str:
        kinds = (f"{kind} {100 * self.share(kind):.3g} %" for kind in self.kinds)
        return f"{format_bytes(self.nbytes)}: {', '.join(kinds)}"


def stored_in(path: Path) -> StoredSize:
    """Raises CheckpointError."""
    checkpoint = open_checkpoint(path)
    kinds = kinds_of(checkpoint)
    checkpoint.close()
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else part_files(path)
    return StoredSize(sum(file.stat().st_size for file in files), kinds)


def kinds_of(checkpoint: Checkpoint) -> dict[str, int]:
    """How many numbers are kept as what, the most first."""
    kinds: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        kinds[tensor.dtype] += math.prod(tensor.shape)
    return dict(kinds.most_common())


def _said(isq: str | None, before: StoredSize, after: StoredSize) -> list[str]:
    lines = [f"it was {before}", f"it is {after}"]
    if isq is None:
        return lines
    kind = kind_name(SCHEMES[isq](np.dtype(np.float32)))
    if after.share(kind) < MOST:
        lines.append(
            f"{after.share(kind):.1%} of the weights are {isq} ({kind}): its blocks do not divide the rows of the "
            "others, or they are embedding and head, which take more bits"
        )
    if after.nbytes >= before.nbytes:
        lines.append("it is no smaller than it was, and was rounded once more")
    return lines


MOST = 0.5
"""If less than this share became what was asked for, it is said why."""


@contextmanager
def new_destination(destination: Path, source: Path) -> Iterator[Path]:
    """A path beside `destination` that is renamed to it at the end, or removed on failure. Raises ConfigError."""
    if destination.exists() or destination.is_symlink():
        what = "the source itself" if destination.resolve() == source.resolve() else "which exists"
        raise ConfigError(f"destination is {str(destination)!r}, {what}; accepted is a path that does not exist")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.partial-"))
    except OSError as error:
        raise ConfigError(f"destination is {str(destination)!r}: {_reason(error)}") from None
    try:
        yield work / destination.name
        (work / destination.name).rename(destination)
    except OSError as error:
        raise ConfigError(f"destination is {str(destination)!r}: {_reason(error)}; nothing was kept") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _reason(error: OSError) -> str:
    is_full = error.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    return "the disk is full" if is_full else one_line(error.strerror or error)


class MergedAdapter(NamedTuple):
    """An adapter to merge, and how strongly: 1 is as it was trained."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> MergedAdapter:
        """`PATH` or `PATH=SCALE`. Raises ConfigError where the scale is no finite number."""
        path, equals, scale = text.rpartition("=")
        if not equals or existing(text) is not None:
            return cls(in_home(text))
        try:
            number = float(scale)
        except ValueError:
            number = np.nan
        if not path or not np.isfinite(number):
            raise ConfigError(f"merge_lora is {text!r}; accepted is PATH or PATH=SCALE, the scale a finite number")
        return cls(in_home(path), number)


def with_adapters(checkpoint: Checkpoint, adapters: Sequence[MergedAdapter]) -> Checkpoint:
    """`checkpoint` with adapters merged into its weights one after the other; as it is where there are none.

    A head that is the embedding becomes one of its own where an adapter changes one of the two.
    Raises ConfigError for a converted checkpoint, and CheckpointError for a tensor that does not fit.
    """
    if not adapters:
        return checkpoint
    if checkpoint.format not in ("safetensors", "gguf"):
        raise ConfigError(
            f"merge_lora takes a model as it was published; {checkpoint.path} was converted already: merge into what "
            "it was made of"
        )
    merging = _Merging(checkpoint)
    for one in adapters:
        merging.add(open_adapter(one.path), one.scale)
    return merging.finished()


Paths = defaultdict[str, list[tuple[str, tuple[Source, ...], int]]]
"""Tensor name -> the parameters that it may be a part of, each with all its parts, and which of these it is."""


class _Merging:
    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint, self._spec = checkpoint, model_spec(checkpoint)
        self._rename = hf_renaming(checkpoint.tensors) if checkpoint.format == "safetensors" else str
        self._edits: defaultdict[str, list[Edit]] = defaultdict(list)
        self._embedding = self._sources("embed.weight")[0].name
        self._head = self._sources("head.weight")[0].name if self._spec.config.tie_word_embeddings else None
        """The name of a head that the checkpoint does not have, since it is the embedding."""

    def add(self, adapter: Adapter, scale: float) -> None:
        paths: Paths = defaultdict(list)
        for path, options in adapter_names(self._spec)[adapter.format].items():
            for sources in options:
                for index, source in enumerate(sources):
                    if not source.stack:
                        paths[source.name].append((path, sources, index))
        for name, tensor in adapter.replaced.items():
            place = self._place(adapter, paths, name)
            values = place.replacing(tensor)
            self._edit(adapter, name, place, values.shape, partial(_replaced, values))
        for name, update in adapter.updates.items():
            place = self._place(adapter, paths, name)
            moved = place.adding(update)
            self._edit(adapter, name, place, moved.shape, partial(moved.added_to, strength=scale))

    def finished(self) -> MergedCheckpoint:
        config, copies = self._checkpoint.config, {}
        if self._head is not None and self._edits.keys() & {self._head, self._embedding}:
            copies[self._head] = self._embedding
            config = _untied(config) if self._checkpoint.format == "safetensors" else config
        return MergedCheckpoint(self._checkpoint, self._edits, copies, config)

    def _sources(self, path: str) -> tuple[Source, ...]:
        options, there = self._spec.names.get(path, ((),)), self._checkpoint.tensors
        return next((sources for sources in options if all(s.name in there for s in sources)), options[0])

    def _place(self, adapter: Adapter, paths: Paths, name: str) -> TensorPlace:
        """The tensor that an adapter calls `name`. Raises CheckpointError where it cannot be merged."""
        there = self._checkpoint.tensors
        same_format = (adapter.format == "gguf") == (self._checkpoint.format == "gguf")
        if same_format and (own := self._rename(name)) in there:
            return TensorPlace(own, Source(own), Source(own))
        here: tuple[Source, ...] = ()
        for path, sources, index in paths[name]:
            here = self._sources(path)
            if len(here) == len(sources) and _is_simple(here[index]) and _is_simple(sources[index]):
                if here[index].name in there or here[index].name == self._head:
                    return TensorPlace(here[index].name, sources[index], here[index])
                break
        else:
            if here and here[0].name in there:
                raise CheckpointError(
                    f"{self._checkpoint.path}: keeps {shown(name)} in another layout, together with others; merge the "
                    "adapter into the model that it was trained on, and convert the result"
                )
        trained = f"; it was trained on {shown(adapter.base_model)}" if adapter.base_model else ""
        raise CheckpointError(
            f"{adapter.path}: changes {shown(name)}, which {self._checkpoint.path} does not have{trained}"
        )

    def _edit(self, adapter: Adapter, name: str, place: TensorPlace, shape: tuple[int, ...], edit: Edit) -> None:
        stored = self._embedding if place.name == self._head else place.name
        expected = self._checkpoint.tensors[stored].shape
        if shape != expected:
            raise CheckpointError(
                f"{adapter.path}: {shown(name)} is of shape {shape}; expected is {expected}, as "
                f"{self._checkpoint.path} has it"
            )
        self._edits[place.name].append(edit)


def _replaced(values: np.ndarray, _: np.ndarray) -> np.ndarray:
    return values


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    changed = {"text_config": _untied(inner)} if isinstance(inner, dict) and "tie_word_embeddings" in inner else {}
    return config | changed | {"tie_word_embeddings": False}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the checkpoint that an adapter changes, as the two keep it: `there` and `here`."""

    name: str
    there: Source
    here: Source

    def replacing(self, tensor: np.ndarray) -> np.ndarray:
        values = tensor.astype(np.float32)
        return _undone(self.here, values if self.there.transform is None else self.there.transform(values))

    def adding(self, update: LowRank) -> LowRank:
        magnitude = None if update.magnitude is None else self._rows(update.magnitude)
        flips = (self.there.transform is transposed) != (self.here.transform is transposed)
        return replace(update, b=self._rows(update.b), magnitude=magnitude, transposed=update.transposed != flips)

    def _rows(self, values: np.ndarray) -> np.ndarray:
        if self.there.by_rows and self.there.transform is not None:
            values = self.there.transform(values)
        return _undone(self.here, values) if self.here.by_rows else values


def _is_simple(source: Source) -> bool:
    """Whether its way into the engine can be taken back."""
    return not source.stack and not source.also and (source.moves_rows or source.transform in (transposed, plus_one))


def _undone(source: Source, values: np.ndarray) -> np.ndarray:
    if source.transform is None:
        return values
    if source.by_rows:
        rows = np.empty_like(values)
        rows[source.transform(np.arange(len(values)))] = values
        return rows
    return values - 1 if source.transform is plus_one else transposed(values)
