"""From one checkpoint to another: quantized, laid out for the engine, or in a format that others read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jaxllm.cli.convert.destination import new_destination
from jaxllm.compat import under_own_settings
from jaxllm.config import EngineConfig
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import ConfigError
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
