"""Make a GPTQ checkpoint of a plain one: `python examples/convert_gptq.py MODEL-FOLDER NEW-FOLDER`.

Each matrix is rounded column by column, and the error of each column is made good by those that are still to come, as
far as the inputs that the model sees tell how (Frantar et al. 2022, arXiv:2210.17323). A folder of the built-in model:
`jaxllm convert smollm2-135m FOLDER --to safetensors`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from calibration import LINEARS, Weights, arguments, expanded, gram, prepared, report, spread, to_codes
from jax import lax


@partial(jax.jit, static_argnames=("size", "symmetric"))
def gptq(
    weight: jax.Array, hessian: jax.Array, damping: float, *, size: int, symmetric: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes `[o, i]`, scales and zero points `[o, groups]` of a matrix whose inputs have the Gram matrix `hessian`."""
    rows, inputs = weight.shape
    unused = jnp.diag(hessian) == 0
    hessian = hessian + jnp.diag(jnp.where(unused, 1.0, damping * jnp.diag(hessian).mean()))
    upper = jnp.linalg.cholesky(jnp.linalg.inv(hessian)).T  # row i: how the error of column i spreads to later ones

    def group(weight: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        mine = lax.dynamic_slice_in_dim(weight, start, size, 1)
        spreads = lax.dynamic_slice_in_dim(upper, start, size, 0)  # [size, i]
        inner = lax.dynamic_slice_in_dim(spreads, start, size, 1)
        scale, zero = spread(mine[:, None], symmetric)
        scale, zero = scale[:, 0], zero[:, 0]

        def column(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            mine, codes, errors = state
            code = to_codes(mine[:, i], scale, zero)
            error = (mine[:, i] - (code - zero) * scale) / inner[i, i]
            mine = mine - error[:, None] * jnp.where(jnp.arange(size) > i, inner[i], 0)
            return mine, codes.at[:, i].set(code), errors.at[:, i].set(error)

        blank = jnp.zeros((rows, size))
        _, codes, errors = lax.fori_loop(0, size, column, (mine, blank, blank))
        later = jnp.arange(inputs) >= start + size
        return weight - jnp.where(later, errors @ spreads, 0), (codes, scale, zero)

    _, (codes, scale, zero) = lax.scan(group, jnp.where(unused, 0, weight), jnp.arange(0, inputs, size))
    return codes.transpose(1, 0, 2).reshape(weight.shape), scale.T, zero.T


def quantized(
    weight: jax.Array, hessian: jax.Array, size: int, symmetric: bool, act_order: bool
) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """As `gptq`, and the group of each input; with `act_order` the inputs that matter most come first."""
    inputs = weight.shape[1]
    order = np.argsort(-np.asarray(jnp.diag(hessian)), kind="stable") if act_order else np.arange(inputs)
    place = np.argsort(order)
    for damping in (0.01, 0.1, 1.0):  # more where single precision does not do
        found = gptq(weight[:, order], hessian[order][:, order], damping, size=size, symmetric=symmetric)
        if jnp.isfinite(found[1]).all():
            codes, scale, zero = found
            return codes[:, place], scale, zero, (place // size).astype(np.int32)
    raise SystemExit("the inputs of a matrix are too much alike; calibrate with another text")


def pack(codes: np.ndarray, axis: int) -> np.ndarray:
    """Eight codes of four bits in an int32, the first in the lowest bits."""
    parts = np.moveaxis(codes.astype(np.uint32), axis, -1)
    parts = parts.reshape(*parts.shape[:-1], -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return np.moveaxis(np.bitwise_or.reduce(parts, axis=-1), -1, axis).view(np.int32)


def checkpoint_tensors(
    codes: jax.Array, scale: jax.Array, zero: jax.Array, group_of: np.ndarray
) -> dict[str, np.ndarray]:
    """As AutoGPTQ writes them: inputs before outputs, and zero points less one."""
    return {
        "qweight": pack(np.asarray(codes).T, 0),  # [i / 8, o]
        "qzeros": pack(np.asarray(zero).T - 1, 1),  # [groups, o / 8]
        "scales": np.asarray(scale, np.float16).T,  # [groups, o]
        "g_idx": group_of,
    }


def main() -> None:
    parser = arguments("Make a GPTQ checkpoint (4 bits) of a float one.")
    parser.add_argument("--act-order", action="store_true", help="round the inputs that matter most first")
    args = parser.parse_args()
    model, windows, held_out = prepared(args)
    x, made, layers = model.embed(windows), {}, []
    for number, weights in enumerate(model.layers):
        _, into = model.layer(weights, x)
        hessians = {name: gram(inputs) for name, inputs in into.items()}
        found: Weights = dict(weights)
        for name, kind in LINEARS.items():
            weight = weights[f"{name}.weight"]
            parts = quantized(weight, hessians[kind], args.group_size, True, args.act_order)
            found[f"{name}.weight"] = expanded(*parts)
            tensors = checkpoint_tensors(*parts)
            made |= {f"model.layers.{number}.{name}.{suffix}": array for suffix, array in tensors.items()}
        x, _ = model.layer(found, x)  # the next layer sees what this one will give
        layers.append(found)
        print(f"layer {number + 1} of {len(model.layers)}", flush=True)
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": args.group_size, "sym": True, "desc_act": args.act_order,
        "checkpoint_format": "gptq", "true_sequential": False, "lm_head": False, "damp_percent": 0.01,
    }  # fmt: skip
    model.save(args.target, made, quantization)
    report(model, layers, "GPTQ", held_out, args.group_size, True)


if __name__ == "__main__":
    main()
