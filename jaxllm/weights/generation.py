"""generation_config.json: recommended sampling and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.weights.fields import NULL, FieldKinds, check_fields, either, many, real, whole
from jaxllm.weights.folder import model_file, read_object
from jaxllm.weights.gguf_parts import whole_name

TOKEN_ID = whole(0, 2**31 - 1)
EOS_FIELDS: FieldKinds = {"eos_token_id": either(TOKEN_ID, many(TOKEN_ID, 1024), NULL)}
"""Of config.json too."""
SAMPLING_FIELDS: FieldKinds = {
    "temperature": either(real(0, 1e3), NULL),
    "top_p": either(real(1e-6, 1), NULL),
    "top_k": either(whole(-1, 2**31 - 1), NULL),
    "min_p": either(real(0, 1), NULL),
    "repetition_penalty": either(real(1e-6, 1e3), NULL),
}
"""What is recommended to sample with."""
GENERATION_FIELDS: FieldKinds = EOS_FIELDS | SAMPLING_FIELDS


def generation_config_of(path: Path) -> Path:
    """Where a GGUF's sampling defaults lie, if anywhere: MODEL.generation_config.json for MODEL.gguf, split or not."""
    return whole_name(path).with_suffix(".generation_config.json")


def read_generation_config(folder: Path, name: str = "generation_config.json") -> dict[str, Any]:
    """The file's content; empty where there is none. Raises CheckpointError naming a field that is wrong."""
    if not model_file(folder, name).exists():
        return {}
    given = read_object(folder, name)
    try:
        check_fields(given, GENERATION_FIELDS)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / name}: {error}") from None
    return given
