"""What convert_gptq.py and convert_awq.py share: a Llama in forty lines that shows what goes into each product."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.text.tokenizer import load_tokenizer

LINEARS = {
    "self_attn.q_proj": "attention", "self_attn.k_proj": "attention", "self_attn.v_proj": "attention",
    "self_attn.o_proj": "output", "mlp.gate_proj": "mlp", "mlp.up_proj": "mlp", "mlp.down_proj": "down",
}  # fmt: skip
"""The products of a layer -> what goes into them."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TEXT = Path(__file__).parents[1] / "jaxllm/cli/bench/perplexity.txt"
BITS, LARGEST = 4, 15

Weights = dict[str, jax.Array]
Layer = Callable[[Weights, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


class Model:
    """A folder's config and float weights; `layers[i]` has those of a layer by the names behind `model.layers.i.`."""

    def __init__(self, folder: Path):
        self.folder, self.config = folder, json.loads((folder / "config.json").read_text())
        c = self.config
        if c["model_type"] not in FAMILIES or c.get("rope_scaling") or c.get("quantization_config"):
            raise SystemExit(f"{folder}: accepted are float models of {', '.join(FAMILIES)} without rope scaling")
        self.tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        self.layers: list[Weights] = [
            {
                name.removeprefix(f"model.layers.{i}."): jnp.asarray(tensor, jnp.float32)
                for name, tensor in self.tensors.items()
                if name.startswith(f"model.layers.{i}.")
            }
            for i in range(c["num_hidden_layers"])
        ]
        self.layer: Layer = jax.jit(partial(layer, c))

    def embed(self, tokens: np.ndarray) -> jax.Array:
        return jnp.asarray(self.tensors["model.embed_tokens.weight"][tokens], jnp.float32)

    def perplexity(self, layers: list[Weights], tokens: np.ndarray) -> float:
        """Of windows `[n, t]`, the first token of each unpredicted."""
        x = self.embed(tokens)
        for weights in layers:
            x, _ = self.layer(weights, x)
        x = norm(x, jnp.asarray(self.tensors["model.norm.weight"], jnp.float32), self.config)
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        head = jnp.asarray(head, jnp.float32)
        losses = []
        for hidden, window in zip(x, tokens, strict=True):
            scores = jax.nn.log_softmax(hidden[:-1] @ head.T)
            losses.append(-jnp.take_along_axis(scores, window[1:, None], axis=1).mean())
        return float(jnp.exp(jnp.stack(losses).mean()))

    def save(self, target: Path, replaced: dict[str, np.ndarray], quantization: dict[str, Any]) -> None:
        """A copy of the folder in which `replaced` stands for the weights of the linears, and changed norms."""
        linears = {f"model.layers.{i}.{name}.weight" for i in range(len(self.layers)) for name in LINEARS}
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in linears}
        work = target.with_name(f".{target.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        skipped = shutil.ignore_patterns("*.safetensors", "*.index.json", "config.json")
        shutil.copytree(self.folder, work, ignore=skipped)
        tensors = {name: np.ascontiguousarray(array) for name, array in (kept | replaced).items()}
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        config = self.config | {"quantization_config": quantization}
        (work / "config.json").write_text(json.dumps(config, indent=2))
        work.rename(target)


def norm(x: jax.Array, weight: jax.Array, c: dict[str, Any]) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * weight


def layer(c: dict[str, Any], w: Weights, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`[n, t, E]` -> the same behind one layer, and what went into its products."""
    heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads") or c["num_attention_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    n, t, _ = x.shape

    def linear(name: str, value: jax.Array) -> jax.Array:
        return value @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    angles = jnp.arange(t)[:, None] / c.get("rope_theta", 10_000.0) ** (jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def heads_of(name: str, count: int, turned: bool) -> jax.Array:
        value = linear(f"self_attn.{name}_proj", into["attention"]).reshape(n, t, count, size)
        if f"self_attn.{name}_norm.weight" in w:
            value = norm(value, w[f"self_attn.{name}_norm.weight"], c)
        a, b = jnp.split(value, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1) if turned else value

    into = {"attention": norm(x, w["input_layernorm.weight"], c)}
    q, k, v = heads_of("q", heads, True), heads_of("k", kv_heads, True), heads_of("v", kv_heads, False)
    into["output"] = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(n, t, -1)
    x = x + linear("self_attn.o_proj", into["output"])
    into["mlp"] = norm(x, w["post_attention_layernorm.weight"], c)
    into["down"] = jax.nn.silu(linear("mlp.gate_proj", into["mlp"])) * linear("mlp.up_proj", into["mlp"])
    return x + linear("mlp.down_proj", into["down"]), into


def gram(inputs: jax.Array) -> jax.Array:
    """`X.T @ X`: all that errors of a product need to know of its inputs."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    return flat.T @ flat / flat.shape[0]


def spread(weight: jax.Array, symmetric: bool) -> tuple[jax.Array, jax.Array]:
    """Scale and zero point `[o, groups]` of codes 0 … 15 over each group of `[o, groups, size]`."""
    high, low = jnp.maximum(weight.max(-1), 0), jnp.minimum(weight.min(-1), 0)
    scale = jnp.maximum(jnp.maximum(high, -low) / 7.5 if symmetric else (high - low) / LARGEST, 1e-8)
    scale = scale.astype(jnp.float16).astype(jnp.float32)
    scale = jnp.where(scale > 0, scale, 2.0**-24)
    return scale, jnp.full(scale.shape, 8.0) if symmetric else jnp.clip(jnp.round(-low / scale), 0, LARGEST)


def to_codes(weight: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(weight / scale + zero), 0, LARGEST)


def rounded(weight: jax.Array, size: int, symmetric: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes `[o, i]`, scales and zero points `[o, groups]`, each weight rounded to the nearest."""
    groups = weight.reshape(weight.shape[0], -1, size)
    scale, zero = spread(groups, symmetric)
    return to_codes(groups, scale[..., None], zero[..., None]).reshape(weight.shape), scale, zero


def expanded(codes: jax.Array, scale: jax.Array, zero: jax.Array, group_of: np.ndarray) -> jax.Array:
    return (codes - zero[:, group_of]) * scale[:, group_of]


def nearest_layers(model: Model, size: int, symmetric: bool) -> list[Weights]:
    """What rounding to nearest makes of all layers, to compare with."""

    def simple(weight: jax.Array) -> jax.Array:
        return expanded(*rounded(weight, size, symmetric), np.arange(weight.shape[1]) // size)

    return [w | {f"{name}.weight": simple(w[f"{name}.weight"]) for name in LINEARS} for w in model.layers]


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("source", type=Path, help="a Hugging Face folder of float weights")
    parser.add_argument("target", type=Path, help="the folder to write; it must not exist")
    parser.add_argument("--group-size", type=int, default=64, help="inputs that share a scale (default 64)")
    parser.add_argument("--text", type=Path, default=TEXT, help="calibration text, the end of which is held out")
    parser.add_argument("--windows", type=int, default=6, help="pieces of text to calibrate with (default 6)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a piece (default 512)")
    return parser


def prepared(args: argparse.Namespace) -> tuple[Model, np.ndarray, np.ndarray]:
    """The model, windows to calibrate with, and a third as many that are held out, behind them in the text."""
    if args.target.exists():
        raise SystemExit(f"{args.target} exists; accepted is a path that does not")
    model = Model(args.source)
    odd = {w[f"{n}.weight"].shape for w in model.layers for n in LINEARS if w[f"{n}.weight"].shape[1] % args.group_size}
    if odd:
        raise SystemExit(f"--group-size is {args.group_size}, which does not divide the inputs of matrices of {odd}")
    ids = load_tokenizer(args.source).encode(args.text.read_text(encoding="utf-8"))
    held_out = max(args.windows // 3, 1)
    count = args.windows + held_out
    if len(ids) < count * args.length:
        raise SystemExit(f"{args.text} has {len(ids):,} tokens; {count} windows of {args.length} were asked for")
    windows = np.array(ids[: count * args.length], np.int32).reshape(count, args.length)
    return model, windows[: args.windows], windows[args.windows :]


def report(model: Model, layers: list[Weights], name: str, held_out: np.ndarray, size: int, symmetric: bool) -> None:
    nearest = nearest_layers(model, size, symmetric)
    for title, found in (("float", model.layers), ("rounded to nearest", nearest), (name, layers)):
        print(f"perplexity, {title}: {model.perplexity(found, held_out):.3f}", flush=True)
