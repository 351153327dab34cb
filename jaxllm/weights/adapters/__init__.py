"""LoRA adapters as PEFT and llama.cpp store them: small matrices that are added to those of a model."""

from __future__ import annotations

from pathlib import Path

from jaxllm.errors import CheckpointError, one_line
from jaxllm.weights.adapters.adapter import Adapter, LowRank, read_gguf_adapter
from jaxllm.weights.adapters.peft_adapter import read_peft_adapter
from jaxllm.weights.adapters.peft_settings import SETTINGS_FILE
from jaxllm.weights.folder import NO_PICKLES, PICKLES

__all__ = ["Adapter", "LowRank", "open_adapter"]


def open_adapter(path: Path) -> Adapter:
    """Read a folder that PEFT saved (adapter_config.json, adapter_model.safetensors) or a GGUF adapter file.

    All tensors are copied into memory, so that the files may be replaced afterwards.

    Raises:
        CheckpointError: there is no adapter, it is corrupt, or it uses something that is not supported. The message
            names the file, the key or tensor, and what is accepted.
    """
    if path.suffix in PICKLES and path.is_file():
        raise CheckpointError(f"{one_line(path)}: {NO_PICKLES}")
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf_adapter(path)
    if path.is_dir():
        return read_peft_adapter(path)
    found = "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{one_line(path)}: {found}; an adapter is a folder with {SETTINGS_FILE} and adapter_model.safetensors, or a "
        ".gguf file"
    )
