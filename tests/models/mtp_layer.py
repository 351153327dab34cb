"""The modules for predicting further tokens of DeepSeek V3 and of GLM, by their definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.definitions import rotated, sigmoid, softmax

MODEL_TYPES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
LATENT_EPS = 1e-6
_QUERIES = ("q_norm", "q_b_proj")
"""What makes queries large, without and with latent attention."""

Weights = dict[str, np.ndarray]


def config_of(c: dict[str, Any]) -> dict[str, Any]:
    """That of a tiny model with a dense layer, one with experts, and the module."""
    c = {key: value for key, value in c.items() if key != "rope_scaling"}
    return c | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def prefix(c: dict[str, Any]) -> str:
    """What the module's tensors begin with."""
    return f"model.layers.{c['num_hidden_layers']}"


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The module's tensors. The embedding and the head in it are the model's in published checkpoints; here they are
    others, as nobody is to read them."""
    size, vocab, expert = c["hidden_size"], c["vocab_size"], c["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, size),
        "enorm.weight": (size,),
        "hnorm.weight": (size,),
        "eh_proj.weight": (size, 2 * size),
        "shared_head.norm.weight": (size,),
        "shared_head.head.weight": (vocab, size),
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "mlp.gate.weight": (c["n_routed_experts"], size),
        "mlp.gate.e_score_correction_bias": (c["n_routed_experts"],),
    }
    found |= _latent_shapes(c) if "kv_lora_rank" in c else _attention_shapes(c)
    blocks = {f"experts.{i}": expert for i in range(c["n_routed_experts"])}
    for block, hidden in (blocks | {"shared_experts": c["n_shared_experts"] * expert}).items():
        found |= {f"mlp.{block}.{part}_proj.weight": (hidden, size) for part in ("gate", "up")}
        found |= {f"mlp.{block}.down_proj.weight": (size, hidden)}
    return {f"{prefix(c)}.{name}": shape for name, shape in found.items()}


def agreeing(weights: Weights, c: dict[str, Any]) -> Weights:
    """These weights, but for a model whose next token mostly follows from the last, and a module that knows this.

    Of three tokens each is followed by the next, and the last by the first, unless what comes before has more to say.
    A random model says one token again and again, and a random module another one. The module's attention is sharp and
    has much to say, so that what it reads of earlier tokens shows in the drafts.
    """
    loud = 8 if "kv_lora_rank" in c else 3
    table, head = loud * weights["model.embed_tokens.weight"], weights["lm_head.weight"].copy()
    threes = np.arange(2, 2 + (len(table) - 2) // 3 * 3).reshape(-1, 3)
    head[np.roll(threes, -1, axis=1)] += table[threes] / loud
    join = weights[f"{prefix(c)}.eh_proj.weight"].copy()
    join[:, : c["hidden_size"]] += np.float32(0.5) * np.eye(c["hidden_size"], dtype=np.float32)
    sharp, loudly = (f"{prefix(c)}.self_attn.{part}.weight" for part in (_QUERIES["kv_lora_rank" in c], "o_proj"))
    return weights | {
        "model.embed_tokens.weight": table,
        "lm_head.weight": head,
        f"{prefix(c)}.eh_proj.weight": join,
        sharp: 8 * weights[sharp],
        loudly: 8 * weights[loudly],
    }


def _latent_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, heads, latent, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "self_attn.q_a_proj.weight": (c["q_lora_rank"], size),
        "self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
        "self_attn.q_b_proj.weight": (heads * (c["qk_nope_head_dim"] + rope), c["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, size),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent),
        "self_attn.o_proj.weight": (size, heads * c["v_head_dim"]),
    }


def _attention_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, dim = c["hidden_size"], c["head_dim"]
    rows = {"q": c["num_attention_heads"] * dim} | dict.fromkeys("kv", c["num_key_value_heads"] * dim)
    return {
        **{f"self_attn.{part}_proj.weight": (count, size) for part, count in rows.items()},
        **{f"self_attn.{part}_proj.bias": (count,) for part, count in rows.items()},
        **{f"self_attn.{part}_norm.weight": (dim,) for part in "qk"},
        "self_attn.o_proj.weight": (size, c["num_attention_heads"] * dim),
    }


def hidden_of(weights: Weights, c: dict[str, Any], embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """What the head reads after each of `T` tokens, whose states are `hidden` and the next ones' `embeddings`."""
    first = f"{prefix(c)}."
    w = {name.removeprefix(first): each.astype(np.float64) for name, each in weights.items() if name.startswith(first)}
    layer = _Layer(w, c)
    both = [layer.norm(embeddings, "enorm"), layer.norm(hidden, "hnorm")]
    x = layer.linear(np.concatenate(both, axis=-1), "eh_proj")
    attention = layer.latent_attention if "kv_lora_rank" in c else layer.attention
    x = x + attention(layer.norm(x, "input_layernorm"))
    return layer.norm(x + layer.experts(layer.norm(x, "post_attention_layernorm")), "shared_head.norm")


class _Layer:
    def __init__(self, weights: Weights, config: dict[str, Any]):
        self.w = weights
        self.c = config

    def norm(self, x: np.ndarray, name: str, eps: float | None = None) -> np.ndarray:
        eps = self.c["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def latent_attention(self, x: np.ndarray) -> np.ndarray:
        """Every head's keys and values expanded; the rotated part of the key is one for all heads."""
        c, tokens, heads = self.c, len(x), self.c["num_attention_heads"]
        flat, rope, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        q = self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", LATENT_EPS)
        q = self.linear(q, "self_attn.q_b_proj").reshape(tokens, heads, flat + rope)
        both = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        shared = _turned(both[:, None, latent:], c)
        expanded = self.norm(both[:, :latent], "self_attn.kv_a_layernorm", LATENT_EPS)
        kv = self.linear(expanded, "self_attn.kv_b_proj").reshape(tokens, heads, -1)
        q = np.concatenate([q[..., :flat], _turned(q[..., flat:], c)], axis=-1)
        k = np.concatenate([kv[..., :flat], np.repeat(shared, heads, axis=1)], axis=-1)
        return self.linear(_read(q, k, kv[..., flat:]), "self_attn.o_proj")

    def attention(self, x: np.ndarray) -> np.ndarray:
        tokens, dim = len(x), self.c["head_dim"]
        q, k, v = (self.linear(x, f"self_attn.{part}_proj").reshape(tokens, -1, dim) for part in "qkv")
        q, k = (rotated(self.norm(a, f"self_attn.{part}_norm"), self.c) for part, a in (("q", q), ("k", k)))
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        return self.linear(_read(q, k, v), "self_attn.o_proj")

    def experts(self, x: np.ndarray) -> np.ndarray:
        """Of the groups with the best two experts together, the best experts; the bias counts for the choice alone."""
        c, out = self.c, self.mlp(x, "mlp.shared_experts")
        scores = sigmoid(x @ self.w["mlp.gate.weight"].T)
        biased = scores + self.w["mlp.gate.e_score_correction_bias"]
        size = c["n_routed_experts"] // c["n_group"]
        for t in range(len(x)):
            strength = [np.sort(group)[-2:].sum() for group in np.split(biased[t], c["n_group"])]
            groups = np.argsort(strength)[-c["topk_group"] :]
            allowed = [group * size + i for group in groups for i in range(size)]
            chosen = sorted(allowed, key=lambda expert: -biased[t, expert])[: c["num_experts_per_tok"]]
            total = scores[t, chosen].sum() if c["norm_topk_prob"] else 1.0
            for expert in chosen:
                share = scores[t, expert] / total * c["routed_scaling_factor"]
                out[t] += share * self.mlp(x[t : t + 1], f"mlp.experts.{expert}")[0]
        return out

    def mlp(self, x: np.ndarray, block: str) -> np.ndarray:
        gate = self.linear(x, f"{block}.gate_proj")
        return self.linear(gate * sigmoid(gate) * self.linear(x, f"{block}.up_proj"), f"{block}.down_proj")


def _read(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """What each token reads of those up to it."""
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    shares = softmax(np.where(np.tri(len(q), dtype=bool), scores, -np.inf))
    return np.einsum("hts,shd->thd", shares, v).reshape(len(q), -1)


def _turned(x: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    """Channels 2i and 2i + 1 as one complex number, at positions 0 and on."""
    size = x.shape[-1]
    angles = np.arange(len(x))[:, None] / c["rope_theta"] ** (np.arange(0, size, 2) / size)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
