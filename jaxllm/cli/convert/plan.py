"""What each format is written from: a model's parameters, each with how it is kept, and the files that go with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.engine.start.options import DTYPES, check_imatrix
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec, abstract_model, model_spec
from jaxllm.text.tokenizer import tokenizer_directory
from jaxllm.weights import source
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.folder import model_file
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec


class ConversionPlan(NamedTuple):
    spec: ModelSpec
    params: list[ParamSpec]
    notes: list[str]
    """What is quantized once more, one sentence each."""


def plan_conversion(config: EngineConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Choose kinds as an engine would whose kernels take any. Raises ConfigError, CheckpointError."""
    check_imatrix(config)
    spec = model_spec(checkpoint)
    kinds = KindChooser(
        checkpoint,
        spec.names,
        config.tensor_parallel_size,
        packed=not config.dequantize,
        isq=config.isq,
        isq_map=config.isq_map or {},
    )
    _, params = abstract_model(spec, BuildOptions(DTYPES[config.dtype]), kinds)
    return ConversionPlan(spec, params, kinds.notes)


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates",
)  # fmt: skip


def copy_tokenizer(config: EngineConfig, checkpoint: Checkpoint, target: Path) -> None:
    """Put the tokenizer and the generation config into `target`. Raises ModelNotFoundError or CheckpointError."""
    generation = dict(checkpoint.generation_config)
    if not config.skip_tokenizer_init:
        name = config.tokenizer or config.model
        found = source.resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir)
        folder = tokenizer_directory(found)
        for file in TOKENIZER_FILES:
            _copy(folder, file, target)
        made = folder / "generation_config.json"
        if found != folder and "eos_token_id" not in generation and made.exists():  # of a GGUF's tokenizer
            generation = json.loads(made.read_text(encoding="utf-8")) | generation
    if generation:
        (target / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _copy(folder: Path, name: str, target: Path) -> None:
    file = model_file(folder, name)
    if file.is_dir():
        (target / name).mkdir()
        for inner in sorted(file.glob("*.jinja")):
            _copy(folder, f"{name}/{inner.name}", target)
    elif file.exists():
        shutil.copyfile(file, target / name)
