"""Tiny LoRA adapters of the tiny models, one for each of PEFT's settings: what PEFT saves, its weights drawn by a seed.

goldens/adapters/NAME.npz has adapter_config.json as PEFT writes it, the names and shapes of the adapter's tensors, and
the logits that PEFT computes with it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from tests.reference import GOLDENS
from tests.reference.tiny import tiny_prompt, tiny_weights

ADAPTER_GOLDENS = GOLDENS / "adapters"
PROMPT_LENGTH = 24
"""Tokens of the model's prompt that are run: long enough for every pattern, and small when stored."""


class AdapterCase(NamedTuple):
    """The tiny model, fields of PEFT's LoraConfig, and changes of adapter_config.json that must move the logits."""

    base: str
    options: dict[str, Any]
    unlike: tuple[dict[str, Any], ...] = ()


_ALL = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}

ADAPTERS: dict[str, AdapterCase] = {
    "plain": AdapterCase(
        "llama_gqa", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}, ({"lora_alpha": 6},)
    ),
    "all_linear_rslora": AdapterCase("llama_gqa", _ALL | {"use_rslora": True}, ({"use_rslora": False},)),
    "dora": AdapterCase("llama_gqa", _ALL | {"use_dora": True, "r": 2}, ({"lora_alpha": 4},)),
    "patterns": AdapterCase(
        "llama_gqa",
        _ALL
        | {
            "rank_pattern": {"q_proj": 2, r"1\.mlp\.up_proj": 6},
            "alpha_pattern": {"down_proj": 20, "^model.*k_proj": 3},
        },
        ({"alpha_pattern": {}},),
    ),
    "one_layer": AdapterCase(
        "llama_gqa",
        {
            "target_modules": ["q_proj", "gate_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "lora_alpha": 16,
        },
    ),
    "regex": AdapterCase("llama_gqa", {"target_modules": r".*\.[02]\.(self_attn\.k_proj|mlp\.down_proj)"}),
    "head": AdapterCase("llama_gqa", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "embedding_and_head": AdapterCase("llama_gqa", {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "r": 3}),
    "tied_head": AdapterCase("llama_mqa_tied", {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]}),
    "tied_embedding": AdapterCase("qwen3_tied", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
    "qwen3_dora_rslora": AdapterCase(
        "qwen3", _ALL | {"use_dora": True, "use_rslora": True, "exclude_modules": ["k_proj"]}, ({"use_rslora": False},)
    ),
    "qwen2_biases": AdapterCase("qwen2", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "gemma3_norms": AdapterCase(
        "gemma3_small", _ALL | {"use_dora": True, "modules_to_save": ["q_norm", "input_layernorm"]}
    ),
    "gemma3_conditional": AdapterCase(
        "gemma3_conditional", {"target_modules": r".*language_model.*\.(q_proj|o_proj|up_proj)", "lora_alpha": 16}
    ),
    "phi3_fused": AdapterCase("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4}),
    "phi3_dora": AdapterCase("phi3", _ALL | {"use_dora": True}),
    "gpt2": AdapterCase("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "r": 4}),
    "gpt2_dora": AdapterCase(
        "gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}
    ),
    "mixtral_attention": AdapterCase("mixtral", {"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 4}),
}


@dataclass(frozen=True)
class AdapterGolden:
    """What PEFT computes with an adapter.

    Attributes:
        prompt_token_ids: T token ids.
        logits: float32 `[T, V]`, after every prompt token.
        settings: adapter_config.json.
        tensor_shapes: of every tensor of the adapter, in the order in which they are drawn.
    """

    prompt_token_ids: list[int]
    logits: np.ndarray
    settings: dict[str, Any]
    tensor_shapes: dict[str, tuple[int, ...]]


def load_adapter_golden(name: str) -> AdapterGolden:
    """The golden of an adapter of `ADAPTERS`."""
    with np.load(ADAPTER_GOLDENS / f"{name}.npz") as stored:
        return AdapterGolden(
            prompt_token_ids=adapter_prompt(name),
            logits=stored["logits"],
            settings=json.loads(str(stored["settings"])),
            tensor_shapes={key: tuple(shape) for key, shape in json.loads(str(stored["tensor_shapes"])).items()},
        )


def adapter_prompt(name: str) -> list[int]:
    """The beginning of the model's prompt."""
    return tiny_prompt(ADAPTERS[name].base)[:PROMPT_LENGTH]


def adapter_tensors(name: str) -> dict[str, np.ndarray]:
    """float32 tensors by PEFT's names; the same on every machine for the same name."""
    return draw_adapter(name, load_adapter_golden(name).tensor_shapes)


def draw_adapter(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The adapter's tensors, drawn in the order of `shapes`; strong enough that each shows in the logits.

    Those of an embedding that PEFT stores unchanged are the model's.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"adapter {name}".encode())))
    tensors, own = {}, tiny_weights(ADAPTERS[name].base)
    for tensor, shape in shapes.items():
        base = tensor.removeprefix("base_model.model.").replace(".base_layer.weight", ".weight")
        tensors[tensor] = own[base] if tensor.endswith(".base_layer.weight") else _draw(rng, tensor, shape)
    return tensors


def write_adapter(name: str, directory: Path, tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write the adapter as PEFT does into `directory`, made where missing; returns it."""
    return save_adapter(load_adapter_golden(name).settings, tensors or adapter_tensors(name), directory)


def save_adapter(settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], directory: Path) -> Path:
    """Write adapter_config.json and adapter_model.safetensors into `directory`, made where missing; returns it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def _draw(rng: np.random.Generator, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    draw = rng.standard_normal(shape, dtype=np.float32)
    if "magnitude" in tensor:
        return np.abs(1 + 0.3 * draw)
    if "lora_A" in tensor or "lora_embedding_B" in tensor or tensor.endswith("lm_head.weight"):
        return draw * np.float32(1 / np.sqrt(shape[-1]))
    return 0.3 * draw
