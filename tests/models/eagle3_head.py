"""EAGLE-3 heads by their definition in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models.definitions import rotated, sigmoid, softmax
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, tiny_weights

LAYERS = (0, 1, 2)
"""In front of which layers of the tiny models the states are."""
FEW = (5, 6, 7)
"""Tokens whose order the head knows; see `agreeing`."""


def head_config(name: str) -> dict[str, Any]:
    """That of a head for a tiny model, with sizes of its own, and with every third token."""
    model = tiny_config(name)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model["hidden_size"],
        "intermediate_size": 76,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "vocab_size": model["vocab_size"],
        "draft_vocab_size": len(head_tokens(model["vocab_size"])),
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }


def head_tokens(vocab_size: int) -> list[int]:
    """Those that its output head has."""
    return sorted({*range(3, vocab_size, 3), *FEW})


def head_weights(name: str) -> dict[str, np.ndarray]:
    """Random ones, but for attention, which is sharp and has much to say."""
    c = head_config(name)
    size, hidden, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(LAYERS) * size),
        "norm.weight": (size,),
        "lm_head.weight": (c["draft_vocab_size"], size),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (hidden, size),
        "midlayer.mlp.up_proj.weight": (hidden, size),
        "midlayer.mlp.down_proj.weight": (size, hidden),
    }
    weights = draw_weights(name, shapes)
    weights["midlayer.self_attn.q_proj.weight"] *= 3
    weights["midlayer.self_attn.o_proj.weight"] *= 8
    tokens = np.array(head_tokens(c["vocab_size"]))
    weights["d2t"] = tokens - np.arange(len(tokens))
    weights["t2d"] = np.isin(np.arange(c["vocab_size"]), tokens)
    return weights


def write_head(name: str, directory: Path, **differences: Any) -> Path:
    """A head for a tiny model; returns the directory."""
    return save_checkpoint(head_config(name) | differences, head_weights(name), directory)


def agreeing(name: str) -> dict[str, np.ndarray]:
    """The tiny model's weights, but for a louder embedding, so that its text has turns that a draft may miss or not."""
    weights, loud = tiny_weights(name), 8 if name == "deepseek_v3" else 4
    table, head = loud * weights["model.embed_tokens.weight"], weights["lm_head.weight"].copy()
    head[np.roll(FEW, -1)] += table[list(FEW)] / loud
    return weights | {"model.embed_tokens.weight": table, "lm_head.weight": head}


def write_model(name: str, directory: Path) -> Path:
    """The model that the head is for; returns the directory."""
    return save_checkpoint(tiny_config(name), agreeing(name), directory)


class Definition:
    """The head of these weights."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        self.w = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.c = config

    def read(self, states: np.ndarray) -> np.ndarray:
        """What it makes of the model's states `[T, 3 E]`."""
        return self._linear(states, "fc")

    def state(self, embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """What its layer gives after each of `T` tokens, whose states are `hidden` and the next ones' `embeddings`."""
        tokens, dim = len(hidden), self.c["head_dim"]
        normed = self.norm(hidden, "midlayer.hidden_norm")
        both = np.concatenate([self.norm(embeddings, "midlayer.input_layernorm"), normed], axis=-1)
        q, k, v = (self._linear(both, f"midlayer.self_attn.{part}_proj").reshape(tokens, -1, dim) for part in "qkv")
        q, k = (rotated(part, self.c | {"partial_rotary_factor": 1.0}) for part in (q, k))
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        shares = softmax(np.where(np.tri(tokens, dtype=bool), scores, -np.inf))
        read = np.einsum("hts,shd->thd", shares, v).reshape(tokens, -1)
        x = (normed if self.c.get("norm_before_residual") else hidden) + self._linear(read, "midlayer.self_attn.o_proj")
        h = self.norm(x, "midlayer.post_attention_layernorm")
        gate = self._linear(h, "midlayer.mlp.gate_proj")
        return x + self._linear(
            gate * sigmoid(gate) * self._linear(h, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj"
        )

    def scores(self, state: np.ndarray) -> np.ndarray:
        """Of all the model's tokens; of those that it lacks -inf."""
        own = self._linear(self.norm(state, "norm"), "lm_head")
        found = np.full((len(state), self.c["vocab_size"]), -np.inf)
        found[:, head_tokens(self.c["vocab_size"])] = own
        return found

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T
