"""A model's support, judged by its config.json or its GGUF metadata alone, and the mechanisms that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError
from jaxllm.models.families import bert, deepseek, llama, mistral
from jaxllm.models.family import Family
from jaxllm.models.registry import FAMILIES, GGUF_FAMILIES, WRAPPERS, model_spec
from jaxllm.quantization.stored import Stored
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.fields import shown
from jaxllm.weights.folder import read_object
from jaxllm.weights.packings import PackedCheckpoint, quantization_config

MECHANISMS: dict[str, tuple[str, ...]] = {
    "sparse attention with an indexer": (
        "index_topk", "index_n_heads", "indexer_n_heads", "sparse_attention_config", "attention.indexer.",
    ),
    "a gated delta rule whose channels fade by themselves (Kimi's linear attention)": ("linear_attn_config", "kda."),
    "state-space layers (Mamba)": (
        "ssm_state_size", "state_size", "mamba_d_state", "mamba_num_heads", "mamba_d_ssm", "ssm_cfg", "ssm.",
    ),
    "RWKV's recurrence": ("rescale_every", "wkv.", "time_mix_extra_dim"),
    "gated linear recurrences": ("lru_width",),
    "hyper-connections": ("hc_mult", "hc_count", "num_residual_streams", "hyper_connection."),
    "alternating updates (AltUp)": ("altup_num_inputs", "altup."),
    "attention biases by distance (ALiBi)": ("alibi", "attention.max_alibi_bias"),
    "an encoder that the decoder attends to": ("is_encoder_decoder", "encoder_layers", "decoder_start_token_id"),
}  # fmt: skip
"""Mechanisms that no family has, or few, and the keys of config.json or of GGUF metadata that ask for them.

Names that end with a dot begin the names of several keys.
"""
SHORTEST_LIKENESS = 4  # letters at the beginning that make one name like another


class Verdict(NamedTuple):
    """The judgement of a model without its weights.

    Attributes:
        family: the one that serves the model, or the nearest.
        missing: what the model has and no family that is like it.
        reason: why it is not served; empty where it is.
    """

    served: bool
    family: Family
    missing: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.served:
            return f"served, as {self.family.name}"
        missing = f"; it needs {', '.join(self.missing)}" if self.missing else ""
        return f"not served: {self.reason}{missing}; the nearest family is {self.family.name}"


class ConfigFile(Checkpoint):
    """A config.json of any name by itself, as a Checkpoint without tensors."""

    format = "safetensors"

    def __init__(self, path: Path):
        self.path = path
        self.config: dict[str, Any] = read_object(path.parent, path.name)
        self.generation_config: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read(self, name: str) -> Stored:
        raise CheckpointError(f"{self.path}: no tensor {name!r}")


def verdict(path: Path) -> Verdict:
    """The verdict on a config.json, a folder with one, or a GGUF file. Raises CheckpointError if there is none."""
    checkpoint = _opened(path)
    try:
        return Verdict(True, model_spec(checkpoint).family)
    except CheckpointError as error:
        if checkpoint.format == "orbax":
            raise
        said = str(error).removeprefix(f"{checkpoint.path}: ")
    finally:
        checkpoint.close()
    kind, keys = _described(checkpoint)
    by_type = {name: family for family in FAMILIES for name in family.model_types} | WRAPPERS
    known = GGUF_FAMILIES if checkpoint.format == "gguf" else by_type
    if isinstance(kind, str) and kind in known:
        return Verdict(False, known[kind], reason=said)
    label = "general.architecture" if checkpoint.format == "gguf" else "model_type"
    missing = tuple(what for what, asking in MECHANISMS.items() if any(_asks(keys, name) for name in asking))
    return Verdict(False, _nearest(str(kind), keys, known), missing, f"{label} is {shown(kind)}")


def _opened(path: Path) -> Checkpoint:
    if path.suffix != ".json" or not path.is_file():
        return open_checkpoint(path, "dummy")
    checkpoint = ConfigFile(path)
    quantized = quantization_config(checkpoint)
    return PackedCheckpoint(checkpoint, quantized) if quantized else checkpoint


def _described(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """A model's name for its architecture, and its other keys: of a wrapper also those of the language model."""
    c = checkpoint.config
    if checkpoint.format == "gguf":
        kind = c.get("general.architecture")
        return kind, {key.removeprefix(f"{kind}."): value for key, value in c.items()}
    inner = (c.get(name) for name in ("text_config", "rope_scaling", "rope_parameters"))
    keys = [found for found in (c, *inner) if isinstance(found, dict)]
    text = keys[1] if isinstance(c.get("text_config"), dict) else {}
    keys += [found for name in ("rope_scaling", "rope_parameters") if isinstance(found := text.get(name), dict)]
    return c.get("model_type"), {key: value for found in keys for key, value in found.items() if value is not None}


def _asks(keys: Mapping[str, Any], name: str) -> bool:
    return any(key.startswith(name) for key in keys) if name.endswith(".") else bool(keys.get(name))


def _nearest(kind: str, keys: Mapping[str, Any], known: Mapping[str, Family]) -> Family:
    """The family whose name begins like this one; else the one that has this sort of attention, or of MLPs."""
    letters = {name: "".join(filter(str.isalnum, name)) for name in known}
    wanted = "".join(filter(str.isalnum, kind))

    def alike(own: str) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, own, strict=False)))

    likeness = {name: alike(own) for name, own in letters.items()}
    best = max(likeness, key=lambda name: (likeness[name], -len(letters[name])))
    if likeness[best] >= SHORTEST_LIKENESS:
        return known[best]
    if any(keys.get(name) for name in ("kv_lora_rank", "attention.kv_lora_rank")):
        return deepseek.V3
    if any(keys.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "expert_count")):
        return mistral.MIXTRAL
    if keys.get("type_vocab_size") or keys.get("attention.causal") is False:
        return bert.BERT
    return llama.LLAMA
