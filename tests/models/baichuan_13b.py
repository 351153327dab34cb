"""A tiny Baichuan of the 13B kind: as many layers, which is what tells it, and float64 NumPy of what it computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.reference.tiny import save_checkpoint

HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 6, 4, 40, 61, 40
SIZE = HEADS * HEAD_DIM
IDS = np.random.default_rng(1).integers(VOCAB, size=60).tolist()
CONFIG: dict[str, Any] = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "model_max_length": 256,
    "tie_word_embeddings": False,
}
Weights = dict[str, np.ndarray]


def weights() -> Weights:
    rng = np.random.default_rng(0)

    def matrix(out: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((out, inputs)) * gain * inputs**-0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(SIZE)).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCAB, SIZE, 5), "model.norm.weight": norm()}
    found["lm_head.weight"] = matrix(VOCAB, SIZE)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.post_attention_layernorm.weight": norm(),
            f"{name}.self_attn.W_pack.weight": matrix(3 * SIZE, SIZE, 1.5),
            f"{name}.self_attn.o_proj.weight": matrix(SIZE, SIZE, 0.5),
            f"{name}.mlp.gate_proj.weight": matrix(MLP, SIZE),
            f"{name}.mlp.up_proj.weight": matrix(MLP, SIZE),
            f"{name}.mlp.down_proj.weight": matrix(SIZE, MLP, 0.5),
        }
    return found


def slopes(heads: int) -> list[float]:
    """As the code that is published with the weights has it (`_get_interleave`)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return slopes(closest) + slopes(2 * closest)[0::2][: heads - closest]


def logits(given: Weights, ids: list[int]) -> np.ndarray:
    """`[T, V]` in float64."""
    w = {name: weight.astype(np.float64) for name, weight in given.items()}
    places = np.arange(len(ids))
    distance = places[None, :] - places[:, None]
    bias = np.array(slopes(HEADS))[:, None, None] * distance
    bias = np.where(distance > 0, -np.inf, bias)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        packed = _rms(x, w[f"{name}.input_layernorm.weight"]) @ w[f"{name}.self_attn.W_pack.weight"].T
        q, k, v = (part.reshape(-1, HEADS, HEAD_DIM).swapaxes(0, 1) for part in np.split(packed, 3, axis=1))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(HEAD_DIM) + bias
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(len(ids), SIZE) @ w[f"{name}.self_attn.o_proj.weight"].T
        h = _rms(x, w[f"{name}.post_attention_layernorm.weight"])
        gate = h @ w[f"{name}.mlp.gate_proj.weight"].T
        up = h @ w[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return _rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def write_folder(directory: Path) -> Path:
    return save_checkpoint(CONFIG, weights(), directory)


NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_file(path: Path, also_keys: dict[str, Any] | None = None) -> Path:
    """As llama.cpp's scripts write it: rows of Q and K for neighbouring pairs, although nothing rotates them."""
    writer = gguf.GGUFWriter(path, "baichuan")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(MLP)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in (also_keys or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        add(key, value)
    tensors = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    found = weights()
    stored = {name: found[theirs] for name, theirs in tensors.items()}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        stored |= {f"blk.{layer}.{own}.weight": found[f"{name}.{theirs}.weight"] for theirs, own in NAMES.items()}
        q, k, v = np.split(found[f"{name}.self_attn.W_pack.weight"], 3)
        stored |= {f"blk.{layer}.attn_{part}.weight": _pairs(rows) for part, rows in (("q", q), ("k", k))}
        stored[f"blk.{layer}.attn_v.weight"] = v
    for name, weight in stored.items():
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(HEADS, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(rows.shape)
