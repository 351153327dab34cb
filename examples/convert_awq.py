"""Make an AWQ checkpoint of a plain one: `python examples/convert_awq.py MODEL-FOLDER NEW-FOLDER`.

Inputs that are large on average are made small, and their weights large, before these are rounded; how much is
searched for on a text (Lin et al. 2023, arXiv:2306.00978). What divides the inputs goes into the norm, or product,
before them. A folder of the built-in model: `jaxllm convert smollm2-135m FOLDER --to safetensors`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from calibration import LINEARS, Weights, arguments, expanded, gram, prepared, report, rounded

STEPS = 20
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Where the outputs of eight lie in an int32, from the lowest bits up."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SHARED = {
    "attention": (ATTENTION, "input_layernorm"),
    "mlp": (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    "output": (("self_attn.o_proj",), "self_attn.v_proj"),
    "down": (("mlp.down_proj",), "mlp.up_proj"),
}
"""What goes into products -> these products, and what the inputs come from, which takes their divisor."""


@partial(jax.jit, static_argnames=("size",))
def best_scale(weight: jax.Array, inputs: jax.Array, hessian: jax.Array, size: int) -> jax.Array:
    """The factors `[i]` on the weights `[o, i]` under which rounding them errs least on these inputs."""
    average = jnp.maximum(jnp.abs(inputs.reshape(-1, inputs.shape[-1])).mean(0), 1e-4)

    def scale_of(step: jax.Array) -> jax.Array:
        scale = average ** (step / STEPS)
        return scale / jnp.sqrt(scale.max() * scale.min())

    def error(step: jax.Array) -> jax.Array:
        scale = scale_of(step)
        found = expanded(*rounded(weight * scale, size, False), np.arange(weight.shape[1]) // size) / scale
        difference = found - weight
        return ((difference @ hessian) * difference).sum()  # of the outputs, squared

    return scale_of(jnp.argmin(jax.lax.map(error, jnp.arange(STEPS))))


def scaled(weights: Weights, into: dict[str, jax.Array], size: int) -> Weights:
    """A layer that computes the same, with weights that are rounded better."""
    found = dict(weights)
    for kind, (products, before) in SHARED.items():
        source = found[f"{before}.weight"]
        if source.shape[0] != into[kind].shape[-1]:
            continue  # heads share their values: no row of v belongs to one input of the output's
        together = jnp.concatenate([weights[f"{name}.weight"] for name in products])
        scale = best_scale(together, into[kind], gram(into[kind]), size)
        found[f"{before}.weight"] = source / (scale if source.ndim == 1 else scale[:, None])
        if f"{before}.bias" in found:
            found[f"{before}.bias"] = found[f"{before}.bias"] / scale
        for name in products:
            found[f"{name}.weight"] = found[f"{name}.weight"] * scale
    return found


def pack(codes: np.ndarray) -> np.ndarray:
    """`[n, o]` -> int32 `[n, o / 8]`, as AutoAWQ's GEMM takes them."""
    parts = codes.astype(np.uint32).reshape(len(codes), -1, 8)[:, :, ORDER]
    return np.bitwise_or.reduce(parts << (4 * np.arange(8, dtype=np.uint32)), axis=-1).view(np.int32)


def checkpoint_tensors(codes: jax.Array, scale: jax.Array, zero: jax.Array) -> dict[str, np.ndarray]:
    """As AutoAWQ writes them: inputs before outputs."""
    return {
        "qweight": pack(np.asarray(codes).T),  # [i, o / 8]
        "qzeros": pack(np.asarray(zero).T),  # [groups, o / 8]
        "scales": np.asarray(scale, np.float16).T,  # [groups, o]
    }


def main() -> None:
    args = arguments("Make an AWQ checkpoint (4 bits) of a float one.").parse_args()
    model, windows, held_out = prepared(args)
    x, made, layers = model.embed(windows), {}, []
    for number, weights in enumerate(model.layers):
        before = f"model.layers.{number}."
        following, into = model.layer(weights, x)
        found = scaled(weights, into, args.group_size)
        for name in LINEARS:
            parts = rounded(found[f"{name}.weight"], args.group_size, False)
            group_of = np.arange(parts[0].shape[1]) // args.group_size
            found[f"{name}.weight"] = expanded(*parts, group_of)
            made |= {f"{before}{name}.{suffix}": array for suffix, array in checkpoint_tensors(*parts).items()}
        for name in found:
            if f"{name.removesuffix('.weight')}" not in LINEARS:  # norms and biases, which took divisors
                dtype = model.tensors[before + name].dtype
                made[before + name] = np.asarray(found[name]).astype(dtype)
                found[name] = jnp.asarray(made[before + name], jnp.float32)
        x = following
        layers.append(found)
        print(f"layer {number + 1} of {len(model.layers)}", flush=True)
    quantization = {
        "quant_method": "awq", "bits": 4, "group_size": args.group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    model.save(args.target, made, quantization)
    report(model, layers, "AWQ", held_out, args.group_size, False)


if __name__ == "__main__":
    main()
