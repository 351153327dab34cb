"""The files of models: where they come from, and readers of safetensors, GGUF and Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config.values import merged
from jaxllm.errors import CheckpointError
from jaxllm.weights.folder import MANIFEST, NO_PICKLES, PICKLES, is_saved, the_gguf_file

if TYPE_CHECKING:  # tokenizers read a model's folder too, in servers that need no JAX
    from jaxllm.weights.checkpoint import Checkpoint


def open_checkpoint(path: Path, load_format: str = "auto", overrides: Mapping[str, Any] = {}) -> Checkpoint:
    """Open a directory of safetensors, quantized or not, or of Orbax arrays; a .gguf file, or a directory with one.

    `load_format` is EngineConfig's: `auto` takes what is there (Orbax before safetensors before GGUF); `orbax`,
    `safetensors` and `gguf` insist; `dummy` needs no weights: config.json or a GGUF's metadata is enough, and `tensors`
    may be empty. `overrides` replace values of config.json, or of what a GGUF's metadata say in its words; in an object
    they replace single keys. Raises CheckpointError when there is nothing of that format, or it is corrupt or
    truncated, or what `jaxllm convert` saved is to be overridden.
    """
    from jaxllm.weights.gguf_file import GGUFCheckpoint
    from jaxllm.weights.packings import PackedCheckpoint, quantization_config
    from jaxllm.weights.safetensors_file import SafetensorsCheckpoint
    from jaxllm.weights.saved import SavedCheckpoint

    if path.suffix in PICKLES and path.is_file():
        raise CheckpointError(f"{path}: {NO_PICKLES}")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if load_format in ("auto", "orbax", "dummy") and is_saved(path):
        if overrides:
            raise CheckpointError(
                f"hf_overrides is set, but {path} was saved with its own; set them at `jaxllm convert`"
            )
        return SavedCheckpoint(path)
    if load_format == "orbax":
        raise CheckpointError(f"{path}: load_format is 'orbax', but there is no directory with {MANIFEST}")
    if load_format in ("auto", "safetensors", "dummy") and path.is_dir() and (path / "config.json").exists():
        has_weights = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()
        if has_weights or load_format != "auto" or not any(path.glob("*.gguf")):
            checkpoint = SafetensorsCheckpoint(path, weights=load_format != "dummy")
            checkpoint.config = overridden(checkpoint.config, overrides)
            config = quantization_config(checkpoint)
            return PackedCheckpoint(checkpoint, config) if config else checkpoint
    if load_format == "safetensors":
        raise CheckpointError(f"{path}: load_format is 'safetensors', but there is no directory with config.json")
    gguf = GGUFCheckpoint(the_gguf_file(path))
    gguf.overrides = overrides
    return gguf


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with other values. Those of the rotary embedding are where the config has it, old key or new."""
    rope = {**(overrides.get("rope_scaling") or {}), **(overrides.get("rope_parameters") or {})}
    if not rope:
        return merged(config, overrides)
    rope |= {"rope_type": rope.pop("type")} if "type" in rope and "rope_type" not in rope else {}
    others = {key: value for key, value in overrides.items() if key not in ("rope_scaling", "rope_parameters")}
    old = config.get("rope_scaling") or ("rope_parameters" not in config and "rope_theta" in config)
    return merged(config, others | {"rope_scaling" if old else "rope_parameters": rope})
