"""From one checkpoint to another: quantized, laid out for the engine, or in a format that others read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import ConfigError, one_line
from jaxllm.progress import Progress
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.source import resolve_model

TargetFormat = Literal["orbax", "safetensors", "gguf"]


@under_own_settings
def convert_model(
    config: EngineConfig,
    destination: Path,
    to: TargetFormat,
    on_progress: Progress | None = None,
    merge_lora: Sequence[str] = (),
) -> None:
    """Write `config.model`, kept as `config` says, to `destination`: whole, or not at all.

    `merge_lora` are adapters that are merged into its weights first, see `merging`.

    Raises:
        ConfigError: the destination exists or cannot be written, or the format cannot hold what is asked for.
        ModelNotFoundError, CheckpointError: as `LLM` would.
    """
    from jaxllm.cli.convert.gguf import write_gguf
    from jaxllm.cli.convert.merging import MergedAdapter, with_adapters
    from jaxllm.cli.convert.orbax import write_orbax
    from jaxllm.cli.convert.safetensors import write_safetensors

    writers: dict[TargetFormat, Callable[[EngineConfig, Checkpoint, Path, Progress | None], None]] = {
        "orbax": write_orbax,
        "safetensors": write_safetensors,
        "gguf": write_gguf,
    }
    if to != "gguf" and destination.suffix == ".gguf":
        raise ConfigError(
            f"destination is {str(destination)!r}, and --to {to} writes a directory; --to gguf writes a file"
        )
    adapters = [MergedAdapter.parse(text) for text in merge_lora]
    source = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    with new_destination(destination, source) as target:
        checkpoint = open_model(config, source)
        try:
            writers[to](config, with_adapters(checkpoint, adapters), target, on_progress)
        finally:
            checkpoint.close()


@contextmanager
def new_destination(destination: Path, source: Path) -> Iterator[Path]:
    """Yields a path beside `destination` to write a file or directory to; what is there at the end is renamed to it.

    If anything fails, nothing is left behind.

    Raises:
        ConfigError: `destination` exists, is `source`, or cannot be written.
    """
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
    if error.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return "the disk is full"
    return one_line(error.strerror or error)
