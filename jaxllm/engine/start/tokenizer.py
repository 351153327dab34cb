"""The tokenizer that a config means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.folders import in_home
from jaxllm.text.tokenizer import Tokenizer, has_chat_template, load_tokenizer
from jaxllm.weights import open_checkpoint, source
from jaxllm.weights.fields import NULL, FieldKinds, check_fields, either, real, whole
from jaxllm.weights.folder import EOS_FIELDS, SAMPLING_FIELDS, read_generation_config

if TYPE_CHECKING:
    from jaxllm.weights.checkpoint import Checkpoint

OVERRIDES: FieldKinds = SAMPLING_FIELDS | {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), either(real(-2, 2), NULL)),
    "max_new_tokens": either(whole(1, 2**31 - 1), NULL),
}


def resolve_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where it is to be left out. Raises ModelNotFoundError, CheckpointError, ConfigError."""
    if config.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(_tokenizer_files(config))
    tokenizer.eos_token_ids = list(dict.fromkeys([*tokenizer.eos_token_ids, *generation_eos(config)]))
    return tokenizer


def answers_chats(config: EngineConfig) -> bool:
    """The model has a chat template, found out without loading anything. Raises as above."""
    return has_chat_template(_tokenizer_files(config))


def _tokenizer_files(config: EngineConfig) -> Path:
    name = config.tokenizer or config.model
    return source.resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir)


_SAME_METHOD = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "compressed_tensors": "compressed-tensors", "gpt_oss_mxfp4": "mxfp4",
    "auto_round": "auto-round", "inc": "auto-round", "modelopt_fp4": "modelopt", "modelopt_mxfp8": "modelopt",
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
    from jaxllm.weights.packings import quantization_config

    stated = (quantization_config(checkpoint) or {}).get("quant_method")
    found = "gguf" if checkpoint.format == "gguf" else stated
    if _SAME_METHOD.get(wanted, wanted) != found:
        holds = "not quantized" if found is None else f"quantized with {found}"
        raise ConfigError(
            f"quantization is {wanted!r}, but {checkpoint.path} is {holds}; leave it out to take the files as they "
            "are, and see isq to quantize while loading"
        )


def generation_eos(config: EngineConfig) -> list[int]:
    """The tokens that end a text by the generation_config.json of another folder, where one is named."""
    if config.generation_config in ("auto", "vllm"):
        return []
    eos = _read(config.generation_config).get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def with_overrides(config: EngineConfig, of_model: dict[str, Any]) -> dict[str, Any]:
    """Recommended sampling as config has it; the tokens that end a text stay the model's."""
    match config.generation_config:
        case "auto":
            found = of_model
        case "vllm":
            found = {name: value for name, value in of_model.items() if name in EOS_FIELDS}
        case folder:
            found = _read(folder)
    overrides = config.override_generation_config or {}
    if unknown := sorted(overrides.keys() - OVERRIDES.keys()):
        raise ConfigError(f"override_generation_config has {unknown[0]!r}; accepted are {', '.join(OVERRIDES)}")
    try:
        check_fields(overrides, OVERRIDES)
    except CheckpointError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    renamed = {"max_new_tokens": "max_tokens"}
    return found | {renamed.get(name, name): value for name, value in overrides.items()}


def _read(folder: str) -> dict[str, Any]:
    path = in_home(folder)
    if not (path / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config is {folder!r}; it must be auto, vllm, or a folder with a generation_config.json"
        )
    return read_generation_config(path)
