"""An importance matrix, whose names are GGUF's, for the tensors of any checkpoint."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.folders import in_home
from jaxllm.models.registry import ModelSpec
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.imatrix import WeighedCheckpoint, read_imatrix

logger = logging.getLogger(__name__)


def with_importance(checkpoint: Checkpoint, spec: ModelSpec, imatrix: Path | None) -> Checkpoint:
    """`checkpoint`, its tensors with their importance; as it is where there is no `imatrix`.

    Raises:
        CheckpointError: the file is not readable.
        ConfigError: it is of another model, or the model's tensors have no names that GGUF knows.
    """
    if imatrix is None:
        return checkpoint
    given = read_imatrix(in_home(imatrix))
    names = _gguf_names(checkpoint, spec)
    found = {name: given[theirs] for name, theirs in names.items() if theirs in given}
    if not found:
        raise ConfigError(
            f"imatrix is {str(imatrix)!r}, none of whose {len(given)} entries is a weight of {checkpoint.path}"
        )
    matrices = [name for name, info in checkpoint.tensors.items() if len(info.shape) > 1]
    logger.info("imatrix: %d of %d matrices have an entry", len(found), len(matrices))
    return WeighedCheckpoint(checkpoint, found)


def _gguf_names(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, str]:
    """The checkpoint's names -> GGUF's."""
    if checkpoint.format == "gguf":
        return {name: name for name in checkpoint.tensors}
    if checkpoint.format != "safetensors" or not spec.family.gguf_architectures:
        raise ConfigError(
            f"imatrix is set, but the tensors of {checkpoint.path} have no names in GGUF; "
            "accepted with a GGUF file, or a Hugging Face model of a family that llama.cpp has"
        )
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[spec.family.gguf_architectures[0]], spec.config.num_layers)
    plain = {name: re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name) for name in checkpoint.tensors}
    found = {name: table.get_name(known, try_suffixes=(".weight", ".bias")) for name, known in plain.items()}
    return {name: theirs for name, theirs in found.items() if theirs is not None}
