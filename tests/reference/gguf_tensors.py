"""What llama.cpp's conversion package does to tensors: stacks, splits, permutes them, or adds some.

They keep the names of a Hugging Face checkpoint, as far as they are still the same tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def of_language_model(weights: Tensors) -> Tensors:
    """Without a wrapper's other tensors, and with the names that its language model has by itself."""
    tensors = {}
    for name, weight in weights.items():
        if re.search("vision_tower|multi_modal_projector", name):
            continue
        name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
        name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
        tensors[name if name.startswith(("model.", "lm_head.")) else f"model.{name}"] = weight
    return tensors


def with_stacked_experts(tensors: Tensors) -> Tensors:
    """One tensor for each of the experts' three matrices, experts first."""
    tensors = {name.replace("e_score_correction_bias", "e_score_correction.bias"): w for name, w in tensors.items()}

    def stacked(found: re.Match[str]) -> str:
        return _stacked_name(found["block"], found["matrix"])

    return _stack(tensors, r"(?P<block>.+)\.experts\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight", stacked)


def _stack(tensors: Tensors, pattern: str, stacked: Callable[[re.Match[str]], str]) -> Tensors:
    """Tensors whose names match `pattern` on top of each other in the order of `number`, under the name `stacked`."""
    stacks: dict[str, Tensors] = {}
    others = {}
    for name, weight in tensors.items():
        if found := re.fullmatch(pattern, name):
            stacks.setdefault(stacked(found), {})[found["number"]] = weight
        else:
            others[name] = weight
    return others | {name: np.stack([parts[str(i)] for i in range(len(parts))]) for name, parts in stacks.items()}


def _stacked_name(block: str, matrix: str) -> str:
    if block.endswith("block_sparse_moe"):  # Mixtral
        return block.replace("model.", "").replace("block_sparse_moe", f"feed_forward.experts.{matrix}.weight")
    if block.endswith("feed_forward"):  # LFM2
        return f"{block.removeprefix('model.')}.experts.{matrix}.weight"
    return f"{block}.experts.{matrix}.weight"


def unchanged(c: Config, tensors: Tensors) -> Tensors:
    return tensors


def permuted(c: Config, tensors: Tensors) -> Tensors:
    """Rows of Q and K for interleaved rotation: row i of a head's first half, then row i of its second."""
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}

    def pairs(weight: np.ndarray, count: int) -> np.ndarray:
        halves = weight.reshape(count, 2, -1, *weight.shape[1:])
        return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)

    return {
        name: pairs(weight, heads[projection]) if (projection := name.split(".")[-2]) in heads else weight
        for name, weight in tensors.items()
    }


def norms_plus_one(c: Config, tensors: Tensors) -> Tensors:
    return {name: weight + 1 if name.endswith("norm.weight") else weight for name, weight in tensors.items()}


def with_stacked_norms(c: Config, tensors: Tensors) -> Tensors:
    """StableLM's norms of every head in one tensor."""
    pattern = r"(?P<norm>.+_layernorm)\.norms\.(?P<number>\d+)\.weight"
    return _stack(tensors, pattern, lambda found: f"{found['norm']}.weight")


def with_split_kv_b(c: Config, tensors: Tensors) -> Tensors:
    """Each head's keys and values from the latent in two tensors, those of the keys transposed for absorption."""
    split = {}
    for name, weight in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = weight.reshape(c["num_attention_heads"], c["qk_nope_head_dim"] + c["v_head_dim"], -1)
            split[name.replace("kv_b", "k_b")] = heads[:, : c["qk_nope_head_dim"]].transpose(0, 2, 1)
            split[name.replace("kv_b", "v_b")] = heads[:, c["qk_nope_head_dim"] :]
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # stacked by Mistral 4's own checkpoints
            split[f"{name}.weight"] = weight
        else:
            split[name] = weight
    return split


def with_flat_convolutions(c: Config, tensors: Tensors) -> Tensors:
    """The taps of each channel as a row of a matrix."""
    tensors = {name.replace("expert_bias", "expert_bias.bias"): weight for name, weight in tensors.items()}
    return {name: weight[:, 0] if name.endswith("conv.conv.weight") else weight for name, weight in tensors.items()}


def of_gpt_oss(c: Config, tensors: Tensors) -> Tensors:
    """Matrices of experts `[out, in]`; gate and up, which alternate, in two tensors."""
    found = {}
    for name, weight in tensors.items():
        stem, is_bias = name.removesuffix("_bias"), name.endswith("_proj_bias")
        if not stem.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name.replace("self_attn.sinks", "self_attn.sinks.weight")] = weight
            continue
        suffix, rows = ("bias", weight) if is_bias else ("weight", weight.swapaxes(1, 2))
        if stem.endswith("down_proj"):
            found[f"{stem}.{suffix}"] = rows
        else:
            found[f"{stem.replace('gate_up', 'gate')}.{suffix}"] = rows[:, ::2]
            found[f"{stem.replace('gate_up', 'up')}.{suffix}"] = rows[:, 1::2]
    return found


def llama3_divisors(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    """What each frequency of llama3's rope is divided by: 1 for short wavelengths, the factor for long ones."""
    rope = (c["rope_parameters"] or {}).get("full_attention", c["rope_parameters"] or {})
    if rope.get("rope_type") != "llama3":
        return
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    yield "rope_freqs.weight", 1 / ((1 - smooth) / factor + smooth)


def longrope_divisors(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    for length in ("long", "short"):
        if factors := c["rope_parameters"].get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", np.asarray(factors)


def further_layer(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    """One of the tensors of a layer that predicts a further token."""
    yield f"blk.{c['num_hidden_layers']}.nextn.enorm.weight", np.ones(c["hidden_size"])


def nothing(c: Config) -> Iterator[tuple[str, np.ndarray]]:
    return iter(())
