"""The tiny models as GGUF files, as llama.cpp's conversion package would write them.

Names of tensors are those of the `gguf` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.reference import gguf_keys as keys_of
from tests.reference import gguf_keys_of_states as state_keys_of
from tests.reference import gguf_tensors as tensors_of
from tests.reference.gguf_keys import Config
from tests.reference.gguf_tensors import Tensors
from tests.reference.tiny import tiny_config, tiny_weights
from tests.reference.tiny_configs.variant import merged

_V2_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.6,
}

FALCON_H1_FACTORS: Config = {
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
"""Those of weights that have them already."""

GGUF_MODELS: dict[str, Config] = {
    "llama_gqa": {},
    "llama_mqa_tied": {},
    "llama3_rope": {},
    "llama_bias": {},
    "llama_mha8": {},
    "llama_tp3": {},
    "llama_linear_rope": {},
    "llama_yarn": {},
    "smollm3": {},
    "smollm3_list": {
        "no_rope_layers": [1, 1, 1],
        "use_sliding_window": False,
    },  # every fourth, if any
    "mistral_window": {"sliding_window": None},
    "mistral_nemo": {},
    "mistral3": {},
    "mistral3_renamed": {},
    "ministral3": {},
    "ministral3_text": {"sliding_window": None, "rope_parameters": _MINISTRAL_YARN},  # mscale is taken to be 1
    "mixtral": {},
    "mixtral_window": {"sliding_window": None},
    "phi": {},
    "phi3": {},
    "phi3_window": {},
    "phi3_longrope_short": {},
    "phi3_longrope_long": {},
    "phi4_mini": {},
    "qwen2": {},
    "qwen2_window": {"use_sliding_window": False},
    "qwen2_yarn": {},
    "qwen3": {},
    "qwen3_tied": {},
    "qwen3_embedding": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "stablelm": {},
    "stablelm_qkv_bias": {},
    "stablelm_qk_layernorm": {},
    "stablelm_parallel": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 24},  # the scale is that of the head size
    "gemma3_small": {"query_pre_attn_scalar": 32, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma3_conditional_renamed": {"text_config": {"query_pre_attn_scalar": 20}},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "gemma4": {},
    "gemma4_moe": {"final_logit_softcapping": 30.0},  # there is always one
    "deepseek_v2_lite": {},
    "deepseek_v2": {"rope_scaling": _V2_YARN},  # mscale is taken to be mscale_all_dim
    "deepseek_v3": {},
    "deepseek_v3_plain": {"rope_interleave": True},  # pairs are neighbours
    "glm4": {},
    "glm4_no_bias": {},
    "lfm2": {},
    "lfm2_bias": {},
    "lfm2_moe": {},
    "olmo2": {},
    "olmo3": {},
    "olmo3_new_rope": {},
    "exaone4": {},
    "exaone4_full": {},
    "cohere": {},
    "cohere_qk_norm": {},
    "cohere2": {},
    "granite": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "starcoder2": {"sliding_window": None},
    "seed_oss": {},
    "hunyuan": {},
    "hunyuan_moe": {},
    "gpt2": {},
    "bloom": {},
    "mpt": {},
    "mpt_clipped": {},
    "mpt_scaled": {"attn_config": {"alibi_bias_max": 12}},  # the scale is that of the head size
    "gpt_neox": {},
    "gpt_neox_in_turn": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "glm4_moe": {},
    "minimax_m2": {},
    "mistral4": {},
    "glm4_moe_lite": {},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_5_moe_conditional": {},
    "mamba2": {},
    "mamba2_bias": {},
    "granite4": {"max_position_embeddings": 2**20},  # as in files of models without positions
    "granite4_moe": {},
    "falcon_h1": FALCON_H1_FACTORS,
    "nemotron_h": {"max_position_embeddings": 2**20},
    "nemotron_h_moe": {"max_position_embeddings": 2**20, "topk_group": 2, "intermediate_size": 36},
    "bert": {},
    "nomic_bert": {},
    "modernbert": {},
    "embedding_gemma": {
        "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 3,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
"""The variants that llama.cpp has an architecture for, and what of their config to change for what GGUF cannot say."""

OLDER_MODELS = ("phi", "qwen2_moe", "gemma3_small", "deepseek_v2_lite", "deepseek_v2", "qwen3_next")
"""Variants that earlier conversion scripts wrote otherwise."""


def gguf_config(name: str) -> Config:
    """config.json content of the model that `write_gguf` writes: the variant's, with the change of `GGUF_MODELS`."""
    return merged(tiny_config(name), GGUF_MODELS[name])


def gguf_architecture(name: str) -> str:
    """`general.architecture` of the file that `write_gguf` writes."""
    return _architecture(tiny_config(name)).name


def write_gguf(
    name: str,
    path: Path,
    *,
    older: bool = False,
    also_keys: Config | None = None,
    also_tensors: Tensors | None = None,
    types: Callable[[str], str] | None = None,
    split: int = 0,
) -> Path:
    """Write the model as `path`, float32 where `types` says nothing else; returns it. `older`: as scripts of 2024 did.

    `also_keys` and `also_tensors` go into the file under the names they have. `types` gives the GGML type of each
    tensor whose rows are whole blocks of it, by its name in the file; vectors stay float32. `split` makes parts of so
    many tensors instead, and the first has none.
    """
    config = gguf_config(name)
    architecture = _architecture(config)
    full = _complete(config)
    tensors = tensors_of.with_stacked_experts(tensors_of.of_language_model(tiny_weights(name)))
    keys, tensors = architecture.keys(full), architecture.tensors(full, tensors)
    if older:
        keys, tensors = _OLDER[architecture.name](full, keys, tensors)
    writer = gguf.GGUFWriter(path, architecture.name, split_max_tensors=split, small_first_shard=bool(split))
    for key, value in keys.items():
        if value is not None:
            add_key(writer, f"{architecture.name}.{key}", value)
    for key, value in (also_keys or {}).items():
        add_key(writer, key, value)
    number = next(full[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if full.get(key))
    names = gguf.get_tensor_name_map(_enumerator(architecture.name), number)
    for tensor, weight in tensors.items():
        stored = names.get_name(tensor, try_suffixes=(".weight", ".bias", ".scale"))
        if stored is None:
            raise KeyError(f"{architecture.name} has no name for {tensor}")
        _add_tensor(writer, stored, np.ascontiguousarray(weight, np.float32), types(stored) if types else "F32")
    for extra, weight in [*architecture.extra(full), *(also_tensors or {}).items()]:
        writer.add_tensor(extra, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, dtype: str) -> None:
    kind = gguf.GGMLQuantizationType[dtype]
    if weight.ndim > 1 and dtype != "F32" and weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        write = {"IQ4_NL": iq4_nl, "NVFP4": nvfp4}.get(dtype, lambda weight: gguf.quants.quantize(weight, kind))
        writer.add_tensor(name, write(weight), raw_dtype=kind)
    else:
        writer.add_tensor(name, weight)


def iq4_nl(weight: np.ndarray) -> np.ndarray:
    """Blocks of the codes that come nearest, which the gguf package does not write."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(-1) / 113).astype(np.float16)
    levels = np.array(gguf.quants.IQ4_NL.kvalues) * np.maximum(scale, np.float16(1e-7))[..., None, None]
    codes = np.abs(groups[..., None] - levels).argmin(-1).astype(np.uint8)
    blocks = [scale[..., None].view(np.uint8), codes[..., :16] | codes[..., 16:] << 4]
    return np.concatenate(blocks, axis=-1).reshape(*weight.shape[:-1], -1)


def nvfp4(weight: np.ndarray) -> np.ndarray:
    groups = weight.reshape(*weight.shape[:-1], -1, 4, 16)
    scale = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(groups).max(-1) / 6)
    levels = np.array(gguf.quants.NVFP4.kvalues) * gguf.quants.NVFP4.ue4m3_to_fp32(scale)[..., None, None]
    codes = np.abs(groups[..., None] - levels).argmin(-1).astype(np.uint8)
    nibbles = (codes[..., :8] | codes[..., 8:] << 4).reshape(*scale.shape[:-1], 32)
    return np.concatenate([scale, nibbles], axis=-1).reshape(*weight.shape[:-1], -1)


def _complete(config: Config) -> Config:
    """The config as the conversion sees it: transformers' defaults filled in, a text model's keys lifted out."""
    from transformers import AutoConfig

    full = AutoConfig.for_model(**config).to_dict()
    return {"num_hidden_layers": len(full.get("layers_block_type") or ())} | full | full.get("text_config", {})


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _enumerator(architecture: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


@dataclass(frozen=True)
class _Architecture:
    name: str
    keys: Callable[[Config], Config]
    tensors: Callable[[Config, Tensors], Tensors] = tensors_of.unchanged
    extra: Callable[[Config], Iterator[tuple[str, np.ndarray]]] = tensors_of.nothing


_LLAMA = _Architecture("llama", keys_of.llama, tensors_of.permuted, tensors_of.llama3_divisors)
_MISTRAL3 = _Architecture("mistral3", keys_of.mistral3, tensors_of.permuted)
_GEMMA3 = _Architecture("gemma3", keys_of.gemma3, tensors_of.norms_plus_one)
_OLMO2 = _Architecture("olmo2", keys_of.windowed)
_DEEPSEEK2 = _Architecture("deepseek2", keys_of.deepseek2, tensors_of.with_split_kv_b)

_QWEN35_MOE = _Architecture("qwen35moe", state_keys_of.qwen3_5, tensors_of.of_qwen3_5)

_ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "smollm3": _Architecture("smollm3", keys_of.llama, tensors_of.permuted),
    "mistral3": _MISTRAL3,
    "ministral3": _MISTRAL3,
    "phi": _Architecture("phi2", keys_of.phi2),
    "phi3": _Architecture("phi3", keys_of.phi3, extra=tensors_of.longrope_divisors),
    "qwen2": _Architecture("qwen2", keys_of.shared),
    "qwen3": _Architecture("qwen3", keys_of.shared),
    "qwen2_moe": _Architecture("qwen2moe", keys_of.qwen2moe),
    "qwen3_moe": _Architecture("qwen3moe", keys_of.qwen2moe),
    "stablelm": _Architecture("stablelm", keys_of.stablelm, tensors_of.with_stacked_norms),
    "gemma": _Architecture("gemma", keys_of.gemma, tensors_of.norms_plus_one),
    "gemma2": _Architecture("gemma2", keys_of.gemma2, tensors_of.norms_plus_one),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llama4_text": _Architecture("llama4", keys_of.llama4, tensors_of.of_llama4, tensors_of.llama3_divisors),
    "gemma4_text": _Architecture("gemma4", keys_of.gemma4, tensors_of.of_gemma4, tensors_of.proportional_divisors),
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK2,
    "glm4": _Architecture("glm4", keys_of.glm4),
    "lfm2": _Architecture("lfm2", state_keys_of.lfm2, tensors_of.with_flat_convolutions),
    "lfm2_moe": _Architecture("lfm2moe", state_keys_of.lfm2, tensors_of.with_flat_convolutions),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "exaone4": _Architecture("exaone4", keys_of.exaone4, extra=tensors_of.llama3_divisors),
    "cohere": _Architecture("command-r", keys_of.cohere),
    "cohere2": _Architecture("cohere2", keys_of.cohere2),
    "granite": _Architecture("granite", keys_of.granite, tensors_of.permuted),
    "ernie4_5": _Architecture("ernie4_5", keys_of.shared),
    "ernie4_5_moe": _Architecture("ernie4_5-moe", keys_of.ernie4_5_moe),
    "starcoder2": _Architecture("starcoder2", keys_of.with_layer_norm),
    "seed_oss": _Architecture("seed_oss", keys_of.shared),
    "glm4_moe_lite": _Architecture("deepseek2", keys_of.glm4_moe_lite, tensors_of.with_split_kv_b),
    "mistral4": _Architecture("mistral4", keys_of.deepseek2, tensors_of.with_split_kv_b),
    "glm4_moe": _Architecture("glm4moe", keys_of.glm4_moe, extra=tensors_of.further_layer),
    "minimax_m2": _Architecture("minimax-m2", keys_of.minimax_m2),
    "gpt_oss": _Architecture("gpt-oss", keys_of.gpt_oss, tensors_of.of_gpt_oss),
    "bert": _Architecture("bert", keys_of.encoder, tensors_of.of_encoder),
    "nomic_bert": _Architecture("nomic-bert", keys_of.encoder, tensors_of.of_encoder),
    "modernbert": _Architecture("modern-bert", keys_of.modern_bert, tensors_of.of_encoder),
    "hunyuan_v1_moe": _Architecture("hunyuan-moe", keys_of.hunyuan_moe, tensors_of.with_split_experts),
    "gpt2": _Architecture("gpt2", keys_of.gpt2, tensors_of.of_gpt2),
    "bloom": _Architecture("bloom", keys_of.bloom, tensors_of.of_bloom),
    "mpt": _Architecture("mpt", keys_of.mpt),
    "gpt_neox": _Architecture("gptneox", keys_of.gptneox, tensors_of.of_gptneox),
    "qwen3_next": _Architecture("qwen3next", state_keys_of.qwen_delta, tensors_of.of_qwen_delta),
    "qwen3_5_text": _Architecture("qwen35", state_keys_of.qwen3_5, tensors_of.of_qwen3_5, tensors_of.further_layer),
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5_moe": _QWEN35_MOE,
    "mamba2": _Architecture("mamba2", state_keys_of.mamba2, tensors_of.with_flat_states),
    "granitemoehybrid": _Architecture("granitehybrid", state_keys_of.granite_hybrid, tensors_of.of_granite_hybrid),
    "falcon_h1": _Architecture("falcon-h1", state_keys_of.falcon_h1, tensors_of.of_falcon_h1),
    "nemotron_h": _Architecture("nemotron_h", state_keys_of.nemotron_h, tensors_of.of_nemotron_h),
    "nemotron_h_moe": _Architecture("nemotron_h_moe", state_keys_of.nemotron_h, tensors_of.of_nemotron_h),
    "hunyuan_v1_dense": _Architecture("hunyuan-dense", keys_of.hunyuan),
}
"""By `model_type`, or a name for those whose models with experts are another architecture."""


def _architecture(config: Config) -> _Architecture:
    if config.get("use_bidirectional_attention") is True:
        return _Architecture("gemma-embedding", keys_of.gemma_embedding, tensors_of.norms_plus_one)
    kind = config["model_type"]
    return _ARCHITECTURES["nemotron_h_moe" if kind == "nemotron_h" and "n_routed_experts" in config else kind]


# What earlier conversion scripts wrote


def _older_phi2(c: Config, keys: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Checkpoints of the time had q, k and v in one tensor."""
    fused = {name: weight for name, weight in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if ".q_proj." in name:
            fused[name.replace("q_proj", "qkv_proj")] = np.concatenate(
                [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            )
    return keys, fused


def _older_qwen2moe(c: Config, keys: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Tensors lost their axes of length 1."""
    return keys, {name: weight.squeeze() for name, weight in tensors.items()}


def _older_gemma3(c: Config, keys: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    return {key: value for key, value in keys.items() if key != "rope.freq_base_swa"}, tensors


def _older_deepseek2(c: Config, keys: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """kv_b was whole, and every head cached its own keys and values."""
    heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
    keys = {key: value for key, value in keys.items() if not key.endswith("_mla")}
    keys |= {
        "attention.head_count_kv": heads,
        "attention.key_length": nope + c["qk_rope_head_dim"],
        "attention.value_length": c["v_head_dim"],
    }
    whole = {}
    for name, weight in tensors.items():
        if name.endswith("k_b_proj.weight"):
            values = tensors[name.replace("k_b", "v_b")]
            rows = np.concatenate([weight.transpose(0, 2, 1), values], axis=1)
            whole[name.replace("k_b", "kv_b")] = rows.reshape(-1, rows.shape[-1])
        elif not name.endswith("v_b_proj.weight"):
            whole[name] = weight
    return keys, whole


def _older_qwen3next(c: Config, keys: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """What linear attention projects was in one tensor, a key head's rows next to each other."""
    count, fused = c["linear_num_key_heads"], dict(tensors)
    for name, qkv in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            z = fused.pop(name.replace("in_proj_qkv", "in_proj_z"))
            per_key = count * c["linear_key_head_dim"]
            parts = [*np.split(fused.pop(name), [per_key, 2 * per_key]), z]
            heads = [part.reshape(count, -1, qkv.shape[1]) for part in parts]
            fused[name.replace("qkv", "qkvz")] = np.concatenate(heads, axis=1).reshape(-1, qkv.shape[1])
    return keys, fused


_OLDER: dict[str, Callable[[Config, Config, Tensors], tuple[Config, Tensors]]] = {
    "phi2": _older_phi2,
    "qwen2moe": _older_qwen2moe,
    "gemma3": _older_gemma3,
    "deepseek2": _older_deepseek2,
    "qwen3next": _older_qwen3next,
}
