"""LoRA adapters trained with optax, on a Llama in a page of JAX: as somebody else's trainer would make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.models.config import DecoderConfig
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.weights import open_checkpoint
from jaxllm.weights.loader import read_rows

Weights = dict[str, jax.Array]
Adapter = dict[str, jax.Array]
MODULES = {"q_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "down_proj": "mlp"}


class Llama(NamedTuple):
    config: DecoderConfig
    weights: Weights

    @classmethod
    def read(cls, path: Path) -> Llama:
        """A model of Llama's family, whatever its format, as float32."""
        checkpoint = open_checkpoint(path)
        spec = model_spec(checkpoint)
        _, parameters = abstract_model(spec, BuildOptions(dtype=jnp.float32))
        weights = {one.path: jnp.asarray(read_rows(checkpoint, one, spec.names)) for one in parameters}
        checkpoint.close()
        return cls(spec.config, weights)


def new_adapter(llama: Llama, rank: int, seed: int) -> Adapter:
    """Which changes nothing yet, in PEFT's names."""
    c, key, adapter = llama.config, jax.random.key(seed), {}
    size, heads, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"q_proj": (heads, size), "v_proj": (kv, size), "o_proj": (size, heads)}
    shapes["down_proj"] = (size, c.intermediate_size)
    for layer in range(c.num_layers):
        for module, (outputs, inputs) in shapes.items():
            key, drawn = jax.random.split(key)
            adapter[_name(layer, module, "A")] = jax.random.normal(drawn, (rank, inputs)) / np.sqrt(inputs)
            adapter[_name(layer, module, "B")] = jnp.zeros((outputs, rank))
    return adapter


def trained(
    llama: Llama, texts: Sequence[Sequence[int]], *, rank: int, steps: int, rate: float, seed: int = 0
) -> Adapter:
    """An adapter, its alpha as great as its rank, that makes each text likely from its second token on."""
    length = max(map(len, texts))
    ids = jnp.array([[*text, *[0] * (length - len(text))] for text in texts])
    counts = jnp.array([[1.0] * (len(text) - 1) + [0.0] * (length - len(text)) for text in texts])
    optimizer = optax.adam(rate)

    def loss(adapter: Adapter, weights: Weights) -> jax.Array:
        logits = jax.vmap(lambda text: _logits(Llama(llama.config, weights), adapter, text))(ids)
        return (
            jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]) * counts) / counts.sum()
        )

    @jax.jit
    def step(adapter: Adapter, state: Any, weights: Weights) -> tuple[Adapter, Any]:
        updates, state = optimizer.update(jax.grad(loss)(adapter, weights), state)
        return optax.apply_updates(adapter, updates), state

    adapter = new_adapter(llama, rank, seed)
    state = optimizer.init(adapter)
    for _ in range(steps):
        adapter, state = step(adapter, state, llama.weights)
    return adapter


def arrays(adapter: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """As PEFT's files hold them."""
    return {name: np.asarray(tensor) for name, tensor in adapter.items()}


def _name(layer: int, module: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{MODULES[module]}.{module}.lora_{side}.weight"


def _logits(llama: Llama, adapter: Adapter, ids: jax.Array) -> jax.Array:
    c, w = llama.config, llama.weights
    heads, kv, dim = c.num_heads, c.num_kv_heads, c.head_dim

    def added(x: jax.Array, layer: int, module: str) -> jax.Array:
        return x @ adapter[_name(layer, module, "A")].T @ adapter[_name(layer, module, "B")].T

    def normed(x: jax.Array, name: str) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.norm_eps) * w[f"{name}.weight"]

    x = w["embed.weight"][ids]
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        h = normed(x, f"{at}.attention_norm")
        q, k, v = jnp.split(h @ w[f"{at}.attention.qkv.weight"].T, [heads * dim, (heads + kv) * dim], axis=-1)
        q, v = q + added(h, layer, "q_proj"), v + added(h, layer, "v_proj")
        out = _attention(*(_by_head(one, dim) for one in (q, k, v)), c.ropes[0].theta)
        x = x + out @ w[f"{at}.attention.output.weight"].T + added(out, layer, "o_proj")
        gate, up = jnp.split(normed(x, f"{at}.mlp_norm") @ w[f"{at}.mlp.gate_up.weight"].T, 2, axis=-1)
        h = jax.nn.silu(gate) * up
        x = x + h @ w[f"{at}.mlp.down.weight"].T + added(h, layer, "down_proj")
    return normed(x, "norm") @ w.get("head.weight", w["embed.weight"]).T


def _by_head(x: jax.Array, dim: int) -> jax.Array:
    return x.reshape(len(x), -1, dim)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, theta: float) -> jax.Array:
    """Causal, of rotated heads; several heads of queries share one of keys."""
    tokens, dim = len(q), q.shape[-1]
    angles = jnp.arange(tokens)[:, None] * theta ** (-jnp.arange(0, dim, 2) / dim)
    cos, sin = (jnp.concatenate([f(angles)] * 2, axis=-1)[:, None] for f in (jnp.cos, jnp.sin))

    def rotated(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

    group = q.shape[1] // k.shape[1]
    q, k, v = rotated(q), jnp.repeat(rotated(k), group, axis=1), jnp.repeat(v, group, axis=1)
    weights = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
    weights = jax.nn.softmax(jnp.where(jnp.tri(tokens, dtype=bool), weights, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", weights, v).reshape(tokens, -1)
