"""The model families: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.config import did_you_mean
from jaxllm.errors import CheckpointError
from jaxllm.models import gemma3, llama, qwen3
from jaxllm.models.decoder import BuildOptions, Decoder, DecoderConfig
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap


@dataclass(frozen=True)
class Family:
    """One family: how its config is parsed, its module, and where its tensors are, for each checkpoint format."""

    name: str
    model_types: tuple[str, ...]
    """`model_type` in config.json."""
    gguf_architectures: tuple[str, ...]
    """`general.architecture` in a GGUF file."""
    config: Any
    """A DecoderConfig class with `from_hf` and `from_gguf`."""
    module: type[Decoder]
    hf_names: Callable[[Any], NameMap]
    gguf_names: Callable[[Any], NameMap]


FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("llama",), ("llama",), llama.LlamaConfig, llama.Llama, llama.hf_names, llama.gguf_names),
    Family("Qwen 3", ("qwen3",), ("qwen3",), qwen3.Qwen3Config, qwen3.Qwen3, qwen3.hf_names, qwen3.gguf_names),
    Family(
        "Gemma 3",
        ("gemma3_text",),
        ("gemma3",),
        gemma3.Gemma3Config,
        gemma3.Gemma3,
        gemma3.hf_names,
        gemma3.gguf_names,
    ),
)

IGNORED_TENSORS = ("*rotary_emb.inv_freq", "rope_freqs.weight")
"""Tensors that say nothing the config does not."""


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's model: its family, its parsed config, and where its tensors are."""

    family: Family
    config: DecoderConfig
    names: NameMap
    ignored: tuple[str, ...]

    def build(self, options: BuildOptions) -> Decoder:
        """The module, with zero weights; call it under `nnx.eval_shape`."""
        return self.family.module(self.config, options)


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Find the family of a checkpoint and parse its config.

    Raises:
        CheckpointError: the architecture is unknown (the supported ones are named), or its config lacks a key.
    """
    gguf = checkpoint.format == "gguf"
    key = "general.architecture" if gguf else "model_type"
    known = {name: f for f in FAMILIES for name in (f.gguf_architectures if gguf else f.model_types)}
    kind = checkpoint.config.get(key)
    if kind not in known:
        hint = did_you_mean(str(kind), known)
        raise CheckpointError(f"{checkpoint.path}: {key} is {kind!r}; supported are {', '.join(known)}{hint}")
    family = known[kind]
    try:
        parse = family.config.from_gguf if gguf else family.config.from_hf
        config = parse(checkpoint.config, checkpoint)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its {kind} config has no {error.args[0]!r}") from None
    names = (family.gguf_names if gguf else family.hf_names)(config)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return ModelSpec(family, config, names, IGNORED_TENSORS + tied)
