"""The checkpoint that a config means, with what it overrides."""

from __future__ import annotations

from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.start.generation import with_overrides
from jaxllm.errors import ConfigError
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.packings import quantization_config

_SAME_METHOD = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "compressed_tensors": "compressed-tensors", "gpt_oss_mxfp4": "mxfp4",
}  # fmt: skip
"""Names of a kernel, or other spellings, by the method that config.json names."""


def open_model(config: EngineConfig, path: Path) -> Checkpoint:
    """The checkpoint at `path`, as `config` wants it seen.

    Raises:
        CheckpointError: see `open_checkpoint`.
        ConfigError: it is not quantized as config.quantization says, or an override cannot be used.
    """
    checkpoint = open_checkpoint(path, config.load_format, config.hf_overrides or {})
    _check_quantization(config.quantization, checkpoint)
    checkpoint.generation_config = with_overrides(config, checkpoint.generation_config)
    return checkpoint


def _check_quantization(wanted: str | None, checkpoint: Checkpoint) -> None:
    if wanted is None:
        return
    stated = (quantization_config(checkpoint) or {}).get("quant_method")
    found = "gguf" if checkpoint.format == "gguf" else stated
    if _SAME_METHOD.get(wanted, wanted) != found:
        holds = "not quantized" if found is None else f"quantized with {found}"
        raise ConfigError(
            f"quantization is {wanted!r}, but {checkpoint.path} is {holds}; leave it out to take the files as they "
            "are, and see isq to quantize while loading"
        )
