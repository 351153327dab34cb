"""What decode attention reaches by itself: GB/s of keys and values, and the share of the memory's floor.

    python benchmarks/cpu_attention.py [--pages int8] [--isa avx2] [--threads 2] [--heads 9 3 64]

Thirty layers, one after the other, each with pages of its own, so that they come from memory as they do in a step. Each
figure is the best of many calls: other programs can only slow a call down.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from cpu_kernels import best, memory_bandwidth

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels.tiles import use_huge_pages
from jaxllm.machine import physical_cores
from jaxllm.pallas_kernels.pages import QUANTIZED, to_storage

LAYERS, PAGE_SIZE = 30, 16
PAGES = {"bf16": np.dtype(np.uint16), **QUANTIZED}
SHAPES = ((1, 192), (1, 4096), (4, 192), (16, 192), (32, 192), (64, 192), (16, 1024))
"""Streams and tokens of context of each."""


def time_decode(
    pages_of: str, streams: int, context: int, heads: int, kv_heads: int, dim: int, seconds: float
) -> tuple[float, int]:
    """Seconds of all layers, and bytes of the keys and values that they read."""
    columns = -(-context // PAGE_SIZE)
    rng = np.random.default_rng(0)
    shape = (streams * columns + 1, kv_heads, PAGE_SIZE, dim)
    store = jax.jit(lambda x: to_storage(x if pages_of != "bf16" else x.astype(jnp.bfloat16), PAGES[pages_of]))
    pages = [store(jnp.asarray(rng.random(shape, np.float32))) for _ in range(2 * LAYERS)]
    table = jnp.asarray(np.arange(1, streams * columns + 1, dtype=np.int32).reshape(streams, columns))
    q = jnp.asarray(rng.normal(size=(streams, heads, dim)), jnp.bfloat16)
    new = jnp.asarray(rng.normal(size=(streams, kv_heads, dim)), jnp.bfloat16)
    positions = jnp.full(streams, context - 1, jnp.int32)

    def chain(q, pages):
        found = []
        for layer in range(LAYERS):
            q, both = cpu_kernels.attention(
                q, new, new, tuple(pages[2 * layer : 2 * layer + 2]), positions, jnp.arange(streams), table,
                scale=dim**-0.5,
            )  # fmt: skip
            found += both
        return q, found

    step = jax.jit(chain, donate_argnums=1).lower(q, pages).compile()
    use_huge_pages(pages)
    held = [pages]

    def call() -> None:
        out, held[0] = step(q, held[0])
        out.block_until_ready()

    row = pages[0].shape[-1] * pages[0].dtype.itemsize
    return best(call, seconds), 2 * LAYERS * streams * context * kv_heads * row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", choices=PAGES, default="bf16", help="what keys and values are kept in")
    parser.add_argument("--isa", choices=cpu_kernels.runnable_isas(), help="default: the best that this machine has")
    parser.add_argument("--threads", type=int, help="default: one for each physical core")
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="of queries, of KV, channels")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    arguments = parser.parse_args()
    threads = arguments.threads or physical_cores()
    bandwidth = memory_bandwidth(threads)
    with cpu_kernels.forced(arguments.isa, threads):
        print(f"pages of {arguments.pages}, {cpu_kernels.isa()}, {threads} threads, memory {bandwidth / 1e9:.0f} GB/s")
        print(f"{'streams':>8} {'context':>8} {'ms':>8} {'GB/s':>6} {'floor':>6}")
        for streams, context in SHAPES:
            seconds, nbytes = time_decode(arguments.pages, streams, context, *arguments.heads, arguments.seconds)
            rate = nbytes / seconds
            print(f"{streams:8} {context:8} {1e3 * seconds:8.2f} {rate / 1e9:6.1f} {rate / bandwidth:6.0%}")


if __name__ == "__main__":
    main()
