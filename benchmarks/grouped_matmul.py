"""The implementations of grouped matmul, and a dense product with every expert, at an MoE layer's shapes.

python benchmarks/grouped_matmul.py [--experts 32] [--tokens 1 16] [--dtypes bfloat16 float32] [--seconds 10]

The gate-and-up product of Qwen3-30B-A3B (2048 -> 2 x 768, 8 experts a token; its 128 experts want 0.8 GB in bfloat16),
tokens choosing experts at random. What is compared takes turns, so that a busy machine slows all of it alike; the
median and the fastest call are shown. On a CPU, `--tokens 512` is for the tiles: the others want gigabytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.products import ragged_dot, tiles
from jaxllm.quantization.weight import Dense

SIZE, HIDDEN, TOP_K = 2048, 768, 8

GROUPED_MATMUL = {"tiles": tiles, "ragged_dot": ragged_dot}


def dense(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Every row by every expert's weight, then the row's own."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    every = jnp.einsum(
        "ni,xoi->xno", x.astype(weight.dtype), weight, precision=precision, preferred_element_type=jnp.float32
    )
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    return jnp.take_along_axis(every, group[None, :, None], axis=0)[0]


def packed(multiply: Any, x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return multiply(x, Dense(weight), group_sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--forms", nargs="+", choices=[*GROUPED_MATMUL, "dense"], default=[*GROUPED_MATMUL, "dense"])
    parser.add_argument("--seconds", type=float, default=10, help="how long each row of the table is measured")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {arguments.experts} experts, [{2 * HIDDEN}, {SIZE}] each")
    print("| dtype | tokens | form | median ms | fastest ms | GB/s of chosen weights | temporary MB |")
    print("|---|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        weight = 0.02 * jax.random.normal(jax.random.key(0), (arguments.experts, 2 * HIDDEN, SIZE), jnp.dtype(dtype))
        for tokens in arguments.tokens:
            measure(arguments.forms, weight, tokens, arguments.seconds)


def measure(forms: list[str], weight: jax.Array, tokens: int, seconds: float) -> None:
    """Print one line for each form."""
    random = np.random.default_rng(0)
    choices = np.concatenate([random.permutation(len(weight))[:TOP_K] for _ in range(tokens)])
    group_sizes = jnp.asarray(np.bincount(choices, minlength=len(weight)), jnp.int32)
    x = jax.random.normal(jax.random.key(1), (tokens * TOP_K, SIZE), weight.dtype)
    compiled = {}
    for form in forms:
        compiled[form] = (
            jax.jit(dense if form == "dense" else partial(packed, GROUPED_MATMUL[form]))
            .lower(x, weight, group_sizes)
            .compile()
        )
        compiled[form](x, weight, group_sizes).block_until_ready()
    times: dict[str, list[float]] = {form: [] for form in forms}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for form in forms:
            start = time.perf_counter()
            compiled[form](x, weight, group_sizes).block_until_ready()
            times[form].append(time.perf_counter() - start)
    chosen = int((group_sizes > 0).sum()) * weight[0].nbytes
    for form in forms:
        median, fastest = 1e3 * statistics.median(times[form]), 1e3 * min(times[form])
        temporary = compiled[form].memory_analysis().temp_size_in_bytes / 1e6
        rate = chosen / fastest / 1e6
        cells = (weight.dtype, tokens, form, f"{median:.1f}", f"{fastest:.1f}", f"{rate:.1f}", f"{temporary:.0f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
