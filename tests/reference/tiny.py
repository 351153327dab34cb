"""Tiny random models of every family: config.json content, and weights drawn from a seed.

Each variant isolates what its family can get wrong; goldens/NAME.npz has what transformers computes on it, and its
tensors' names and shapes as transformers writes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.reference import load_golden
from tests.reference.tiny_configs import CLASSIFIERS, ENCODERS, VARIANTS, VISION

TINY_MODELS = tuple(VARIANTS)
_ALL = VARIANTS | CLASSIFIERS | ENCODERS | VISION

ISOLATES = {name: variant.isolates for name, variant in VARIANTS.items()}
"""What each model shows, in a line."""

ONE_SHOT_ONLY = frozenset(name for name, variant in VARIANTS.items() if variant.one_shot_only)
"""Models whose rope follows the sequence's length, so that transformers rotates a prompt's first tokens otherwise when
they come alone. Their goldens are those of the whole prompt at once."""

ONE_ADDED = ("gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron", "vaultgemma")
"""Models that multiply by 1 + the norm's weight."""

FACTORS = ("layer_scalar", "router.scale", "per_expert_scale")
"""Vectors that are about one, though they are no norm's."""

ATTENTION_GAIN = 1.5
ATTENTION = (
    "q_proj.weight", "k_proj.weight", "qkv_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight",
    "query_key_value.weight", "c_attn.weight", "query.weight", "key.weight", "Wqkv.weight",
)  # fmt: skip
ROUTER_GAIN = 2.5
ROUTER = (
    "mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight", "feed_forward.gate.weight",
    "feed_forward.router.weight", "mlp.gate.wg.weight", "block_sparse_moe.router.layer.weight",
    "mixer.gate.weight",
)  # fmt: skip
STACKS = (
    "experts.gate_up_proj", "experts.up_proj", "experts.down_proj", "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.output_linear.weight",
)  # fmt: skip
"""Of the experts' matrices `[out, in]`, or gpt-oss's and Llama 4's `[in, out]`."""


def tiny_config(name: str) -> dict[str, Any]:
    """The variant's config.json content, a fresh copy."""
    return json.loads(json.dumps(_ALL[name].config))


def tiny_weights(name: str) -> dict[str, np.ndarray]:
    """float32 weights by HF tensor name, matrices `[out, in]`; the same on every machine for the same name.

    Norm weights and biases are random too, so that leaving one out shows in the logits, which are of order 1.
    """
    return draw_weights(name, load_golden(name).tensor_shapes)


def draw_weights(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The variant's weights, drawn in the order of `shapes`."""
    rng = np.random.Generator(np.random.PCG64(_seed(name)))
    kind = _ALL[name].config["model_type"]
    return {tensor: _draw(rng, tensor, shape, kind) for tensor, shape in shapes.items()}


def tiny_prompt(name: str) -> list[int]:
    """The variant's prompt: random token ids, longer than any sliding window."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{name} prompt".encode())))
    config = _ALL[name].config
    vocab_size = config.get("text_config", config)["vocab_size"]
    return rng.integers(vocab_size, size=_ALL[name].prompt_length).tolist()


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write config.json and model.safetensors (float32) into `directory`, made where missing; returns it."""
    return save_checkpoint(tiny_config(name), tiny_weights(name), directory)


def save_checkpoint(config: dict[str, Any], weights: dict[str, np.ndarray], directory: Path) -> Path:
    """Write a checkpoint of this config and these weights into `directory`, made where missing; returns it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _seed(name: str) -> int:
    seed = _ALL[name].seed
    return zlib.crc32((f"{name} {seed}" if seed else name).encode())


def _draw(rng: np.random.Generator, tensor: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    draw = np.asarray(rng.standard_normal(shape, dtype=np.float32))
    if tensor.endswith(FACTORS) or ("norm" in tensor.lower() and tensor.endswith("weight")):
        one_added = kind.removesuffix("_text") in ONE_ADDED and "linear_attn" not in tensor
        return 0.3 * draw + np.float32(0 if one_added else 1)
    if tensor.endswith("linear_attn.A_log"):
        return 1.5 * draw - 2  # some states last for long, some for a few tokens
    if tensor.endswith(("A_log", "dt_bias")) and "linear_attn" not in tensor:
        return draw - 1  # so that states fade over many tokens
    if tensor.endswith(("input_min", "output_min", "input_max", "output_max")):  # bounds that some numbers pass
        return np.asarray((np.abs(draw) * 0.3 + 1) * (-1 if tensor.endswith("_min") else 1), np.float32)
    if len(shape) <= 1 or tensor.endswith("_proj_bias"):
        return np.float32(0.3) * draw if shape else np.asarray(0.3 * draw, np.float32)
    # attention that is not flat, and routing that is far from uniform
    gain = ATTENTION_GAIN if tensor.endswith(ATTENTION) else ROUTER_GAIN if tensor.endswith(ROUTER) else 1.0
    if tensor.endswith("router.proj.weight"):  # whose inputs are divided by the root of their number
        return draw * np.float32(ROUTER_GAIN)
    if kind == "gpt2" and tensor.split(".")[-2].startswith("c_"):  # `[in, out]`
        return draw * np.float32(gain / np.sqrt(shape[0]))
    inputs = (
        shape[1:] if not tensor.endswith(STACKS) else shape[1:2] if kind in ("gpt_oss", "llama4_text") else shape[2:]
    )
    return draw * np.float32(gain / np.sqrt(np.prod(inputs)))
