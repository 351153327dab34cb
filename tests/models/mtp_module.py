"""The modules for predicting further tokens, by their definition in float64: Qwen3-Next's and Qwen3.5's are here, and
DeepSeek V3's and GLM's in `tests.models.mtp_layer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models import mtp_layer
from tests.models.definitions import rotated, sigmoid, softmax
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, tiny_weights

LAYER = "mtp.layers.0"


def mtp_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Its tensors, beside those of the model."""
    if c["model_type"] in mtp_layer.MODEL_TYPES:
        return mtp_layer.shapes(c)
    size, dim, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (size, 2 * size),
        "mtp.norm.weight": (size,),
        "mtp.pre_fc_norm_embedding.weight": (size,),
        "mtp.pre_fc_norm_hidden.weight": (size,),
        f"{LAYER}.input_layernorm.weight": (size,),
        f"{LAYER}.post_attention_layernorm.weight": (size,),
        f"{LAYER}.self_attn.q_proj.weight": (2 * heads * dim, size),
        f"{LAYER}.self_attn.k_proj.weight": (kv * dim, size),
        f"{LAYER}.self_attn.v_proj.weight": (kv * dim, size),
        f"{LAYER}.self_attn.o_proj.weight": (size, heads * dim),
        f"{LAYER}.self_attn.q_norm.weight": (dim,),
        f"{LAYER}.self_attn.k_norm.weight": (dim,),
    }

    def mlp(name: str, hidden: int) -> dict[str, tuple[int, ...]]:
        products = {f"{LAYER}.mlp.{name}{part}_proj.weight": (hidden, size) for part in ("gate", "up")}
        return products | {f"{LAYER}.mlp.{name}down_proj.weight": (size, hidden)}

    if "num_experts" not in c:
        return shapes | mlp("", c["intermediate_size"])
    shapes |= {
        f"{LAYER}.mlp.gate.weight": (c["num_experts"], size),
        f"{LAYER}.mlp.shared_expert_gate.weight": (1, size),
    }
    shapes |= mlp("shared_expert.", c["shared_expert_intermediate_size"])
    for expert in range(c["num_experts"]):
        shapes |= mlp(f"experts.{expert}.", c["moe_intermediate_size"])
    return shapes


def mtp_config(name: str) -> dict[str, Any]:
    """That of a tiny model, with one layer of each kind where it lists them: it compiles in half the time."""
    config = tiny_config(name)
    if config["model_type"] in mtp_layer.MODEL_TYPES:
        return mtp_layer.config_of(config)
    if "layer_types" not in config:
        return config
    return config | {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}


def mtp_weights(name: str) -> dict[str, np.ndarray]:
    """Those of a tiny model, and of a module with it, in which attention has as much to say as all else."""
    config = mtp_config(name)
    dropped = range(config["num_hidden_layers"], tiny_config(name)["num_hidden_layers"])
    prefixes = tuple(f"model.layers.{layer}." for layer in dropped)
    model = {tensor: weight for tensor, weight in tiny_weights(name).items() if not tensor.startswith(prefixes)}
    module = draw_weights(name, mtp_shapes(config))
    if config["model_type"] in mtp_layer.MODEL_TYPES:
        return mtp_layer.agreeing(model | module, config)
    module[f"{LAYER}.self_attn.o_proj.weight"] *= 8
    return model | module


def write_mtp_checkpoint(name: str, directory: Path) -> Path:
    """A tiny model with a module; returns the directory."""
    return save_checkpoint(mtp_config(name), mtp_weights(name), directory)


def module_hidden(
    weights: dict[str, np.ndarray], c: dict[str, Any], embeddings: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """What the head reads after each of `T` tokens, whose states are `hidden` and the next ones' `embeddings`."""
    if c["model_type"] in mtp_layer.MODEL_TYPES:
        return mtp_layer.hidden_of(weights, c, embeddings, hidden)
    w = {name: weight.astype(np.float64) for name, weight in weights.items() if name.startswith("mtp.")}
    tokens, dim, heads, kv = len(hidden), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * (1 + w[f"{name}.weight"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{LAYER}.{name}.weight"].T

    both = [norm(embeddings, "mtp.pre_fc_norm_embedding"), norm(hidden, "mtp.pre_fc_norm_hidden")]
    x = np.concatenate(both, axis=-1) @ w["mtp.fc.weight"].T
    h = norm(x, f"{LAYER}.input_layernorm")
    q, gate = np.split(linear(h, "self_attn.q_proj").reshape(tokens, heads, 2 * dim), 2, axis=-1)
    k, v = (linear(h, f"self_attn.{name}_proj").reshape(tokens, kv, dim) for name in "kv")
    q, k = norm(q, f"{LAYER}.self_attn.q_norm"), norm(k, f"{LAYER}.self_attn.k_norm")
    q, k = (rotated(part, c) for part in (q, k))
    k, v = (np.repeat(part, heads // kv, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
    shares = softmax(np.where(np.tri(tokens, dtype=bool), scores, -np.inf))
    read = np.einsum("hts,shd->thd", shares, v) * sigmoid(gate)
    x = x + linear(read.reshape(tokens, -1), "self_attn.o_proj")
    h = norm(x, f"{LAYER}.post_attention_layernorm")

    def mlp(h: np.ndarray, name: str) -> np.ndarray:
        gate = linear(h, f"mlp.{name}gate_proj")
        return linear(gate * sigmoid(gate) * linear(h, f"mlp.{name}up_proj"), f"mlp.{name}down_proj")

    if "num_experts" not in c:
        return norm(x + mlp(h, ""), "mtp.norm")
    shares, top = softmax(linear(h, "mlp.gate")), c["num_experts_per_tok"]
    chosen = np.argsort(-shares, axis=-1)[:, :top]
    out = sigmoid(linear(h, "mlp.shared_expert_gate")) * mlp(h, "shared_expert.")
    for t in range(tokens):
        total = shares[t, chosen[t]].sum()
        out[t] += sum(shares[t, e] / total * mlp(h[t : t + 1], f"experts.{e}.")[0] for e in chosen[t])
    return norm(x + out, "mtp.norm")
