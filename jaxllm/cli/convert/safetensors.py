"""A Hugging Face directory of float weights: their names, their layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxllm.cli.convert.packed import copy_tokenizer, plan_conversion
from jaxllm.config import EngineConfig
from jaxllm.engine.start.build import eos_token_ids
from jaxllm.engine.start.options import DTYPES
from jaxllm.errors import ConfigError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.family import Family
from jaxllm.models.layers.rope import RopeConfig
from jaxllm.progress import Progress
from jaxllm.quantization.weight import Dense
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.folder import sentence_modules
from jaxllm.weights.loader import ParamSpec, read_parameters
from jaxllm.weights.names import NameMap, Source, Transform, expand, plus_one

SHARD_BYTES = 2 * 2**30
"""Of one file: what is in memory at a time."""

Tensors = Iterator[tuple[str, np.ndarray]]


def write_safetensors(config: EngineConfig, checkpoint: Checkpoint, target: Path, on_progress: Progress | None) -> None:
    """Tensors as `dtype`, and vectors as float32 where that rounds them. Raises ConfigError."""
    if config.isq or config.isq_map:
        raise ConfigError(
            "isq and isq_map go with `--to orbax`, which holds every kind, or `--to gguf`, which holds GGUF's; "
            "safetensors are written as floats"
        )
    dtype = np.dtype(DTYPES[config.dtype])
    target.mkdir()
    if any(module.kind == "Dense" for module in sentence_modules(checkpoint.path)):
        raise ConfigError(
            f"{checkpoint.path} has Dense modules, which `--to orbax` keeps and `--to safetensors` does not"
        )
    content, total = dict(checkpoint.config), len(checkpoint.tensors)
    tensors: Tensors = ((name, checkpoint.read(name).expand()) for name in checkpoint.tensors)
    if checkpoint.format != "safetensors":
        content, tensors, total = _hf_names(config, checkpoint)
    content = {k: v for k, v in content.items() if k not in ("quantization_config", "torch_dtype")}
    content["dtype"] = dtype.name
    _write_shards(target, dtype, tensors, total, on_progress)
    (target / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    copy_tokenizer(config, checkpoint, target)
    tokenizer = target / "tokenizer_config.json"
    if checkpoint.format == "gguf" and tokenizer.exists():
        # It is complete in tokenizer.json: no class of the model's family may build it anew.
        settings = json.loads(tokenizer.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer.write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")


def _hf_names(config: EngineConfig, checkpoint: Checkpoint) -> tuple[dict[str, Any], Tensors, int]:
    plan = plan_conversion(config.model_copy(update={"dequantize": True}), checkpoint)
    family, decoder = plan.spec.family, plan.spec.config
    if decoder.encoder is not None or decoder.num_labels:
        what = "an encoder" if decoder.encoder is not None else "a classifier"
        raise ConfigError(f"{checkpoint.path} is {what}; `--to safetensors` writes language models")
    content = hf_config(family, decoder) | {"eos_token_id": eos_token_ids(checkpoint)}
    names = expand(family.names("safetensors", decoder), decoder.num_layers)
    total = sum(len(source.tensors) for spec in plan.params for source in _sources(spec, names))
    values = read_parameters(checkpoint, plan.params, plan.spec.names, plan.spec.ignored)
    pairs = (
        pair
        for spec, value in zip(plan.params, values, strict=True)
        for pair in _taken_apart(spec, np.asarray(value.array if isinstance(value, Dense) else value), names)
    )
    return content, pairs, total


UNDONE: dict[Transform | None, Transform] = {None: lambda weight: weight, plus_one: lambda weight: weight - 1}
"""What takes back what is done to a tensor on its way into the engine."""


def _sources(spec: ParamSpec, names: NameMap) -> tuple[Source, ...]:
    sources = names[spec.path][0]
    if any(source.transform not in UNDONE or source.also for source in sources):
        raise ConfigError(f"{spec.path} cannot be taken apart into the tensors that `--to safetensors` would name")
    return sources


def _taken_apart(spec: ParamSpec, value: np.ndarray, names: NameMap) -> Tensors:
    sources, axis = _sources(spec, names), spec.layout.axis if spec.layout else 0
    rows = [segment.rows for segment in spec.layout.segments] if spec.layout else [value.shape[0]]
    if len(sources) == 1:
        rows = [sum(rows)]
    start = 0
    for source, size in zip(sources, rows, strict=True):
        part = np.take(value, range(start, start + size), axis)
        start += size
        parts = part if source.stack else [part]
        yield from zip(source.tensors, map(UNDONE[source.transform], parts), strict=True)


def _cast(tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Vectors are few, and layers compute with them in float32: they are rounded where nothing is lost."""
    if not (np.issubdtype(tensor.dtype, np.floating) or tensor.dtype == ml_dtypes.bfloat16):
        return np.ascontiguousarray(tensor)
    cast = tensor.astype(dtype)
    if tensor.ndim < 2 and not np.array_equal(cast.astype(np.float32), tensor.astype(np.float32)):
        cast = tensor.astype(np.float32)
    return np.ascontiguousarray(cast)


def _write_shards(target: Path, dtype: np.dtype, tensors: Tensors, count: int, on_progress: Progress | None) -> None:
    """model.safetensors; where that would be too large, shards and the index that names them."""
    files: list[tuple[Path, list[str]]] = []
    held: dict[str, np.ndarray] = {}
    nbytes = total = 0

    def flush() -> None:
        file = target / f"shard-{len(files)}"
        try:
            save_file(held, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        files.append((file, list(held)))
        held.clear()

    for done, (name, stored) in enumerate(tensors, 1):
        tensor = _cast(stored, dtype)
        if held and nbytes + tensor.nbytes > SHARD_BYTES:
            flush()
            nbytes = 0
        held[name] = tensor
        nbytes, total = nbytes + tensor.nbytes, total + tensor.nbytes
        if on_progress:
            on_progress(done, count)
    flush()
    if len(files) == 1:
        files[0][0].rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        shard = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(target / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def hf_config(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """What `family.from_hf` reads as `config`, which is tried. Raises ConfigError, which names what would be lost."""
    content = _content(family, config)
    try:
        read = family.from_hf(content)
    except KeyError as error:
        raise ConfigError(f"a config.json of {family.name} needs {error.args[0]}, which is not known") from None
    lost = [f.name for f in fields(config) if getattr(read, f.name) != getattr(config, f.name)]
    if lost:
        raise ConfigError(
            f"the {', '.join(lost)} of this {family.name} model cannot be said in a config.json made from another "
            "format; accepted is a model in Hugging Face's"
        )
    return content


def _content(family: Family, c: DecoderConfig) -> dict[str, Any]:
    content: dict[str, Any] = {
        "architectures": [family.architectures[0]], "model_type": family.model_types[0],
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": c.hidden_act, "hidden_activation": c.hidden_act,
        "rms_norm_eps": c.norm_eps, "layer_norm_eps": c.norm_eps, "norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings, "use_qk_norm": c.qk_norm is not None,
        "attention_bias": c.qkv_bias, "attention_out_bias": c.output_bias, "mlp_bias": c.mlp_bias,
        "use_bias": c.mlp_bias, "embedding_multiplier": c.embedding_scale, "residual_multiplier": c.residual_scale,
        "logits_scaling": 1 / c.logit_scale, "logit_scale": c.logit_scale,
        "attn_logit_softcapping": c.attention_softcap, "final_logit_softcapping": c.logit_softcap,
        "sliding_window": None,
    }  # fmt: skip
    if c.attention_scale:
        content["query_pre_attn_scalar"] = round(c.attention_scale**-2)
        content["attention_multiplier"] = c.attention_scale
    everywhere = next((layer.rope for layer in c.layers if layer.window is None and layer.rope), c.layers[0].rope)
    if everywhere is not None:
        content |= _rope(everywhere, c.head_dim)
    windows = {layer.window for layer in c.layers if layer.window is not None}
    if windows:
        content["sliding_window"] = min(windows)
        slides = {True: "sliding_attention", False: "full_attention"}
        content["layer_types"] = [slides[layer.window is not None] for layer in c.layers]
        local = next(layer.rope for layer in c.layers if layer.window is not None)
        if local is not None and local != everywhere:
            content["rope_local_base_freq"] = local.theta
    return content


def _rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dim != head_dim:
        found["partial_rotary_factor"] = rope.dim / head_dim
    if rope.kind == "default":
        return found
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_divisors), "long_factor": list(rope.long_divisors)}
        scaling["attention_factor"] = rope.attention_factor
    return found | {"rope_scaling": scaling}
