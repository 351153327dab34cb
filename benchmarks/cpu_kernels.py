"""What the CPU kernels reach by themselves: GB/s of weights, GOPS, and the share of the memory's floor, per shape.

    python benchmarks/cpu_kernels.py [--isa avx2] [--threads 2] [--format q4_1 ...] [--peak GOPS]

Each figure is the best of many calls: other programs can only slow a call down. `floor` is the time that reading the
weights once, or (with --peak) the arithmetic, would take, over the time that the call took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels.tiles import GROUP
from jaxllm.machine import physical_cores

SHAPES = {
    "576 -> 3072": (576, 3072), "1536 -> 576": (1536, 576),
    "4096 -> 14336": (4096, 14336), "14336 -> 4096": (14336, 4096),
}  # fmt: skip
"""Gate and up, and down, of SmolLM2-135M and of Llama-3.1-8B."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call."""
    call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def memory_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory."""
    parts = np.array_split(np.ones(2**28 // 8, np.uint64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return 2**28 / best(lambda: list(pool.map(np.bitwise_or.reduce, parts)), 2)


def time_product(format: str, inputs: int, outputs: int, rows: int, seconds: float) -> tuple[float, int]:
    """Seconds of one product and bytes of its weights. Several matrices take turns, so that none stays in cache."""
    shape = (-(-outputs // GROUP), inputs // cpu_kernels.tile_inputs(format), cpu_kernels.tile_bytes(format))
    nbytes = int(np.prod(shape))
    copies = max(1, min(32, 2**27 // nbytes))
    rng = np.random.default_rng(0)
    tiles = [jnp.asarray(rng.integers(0, 60, shape, dtype=np.uint8)) for _ in range(copies)]
    x = jnp.asarray(rng.normal(size=(rows, inputs)).astype(np.float32))

    @jax.jit
    def chain(x, tiles):
        for matrix in tiles:  # one after the other, as layers are: XLA runs at once what does not depend on each other
            (product,) = cpu_kernels.linears(x, [cpu_kernels.Tiles(matrix, format, outputs)])
            x = x.at[0, 0].set(product[0, 0])
        return x

    return best(lambda: chain(x, tiles).block_until_ready(), seconds) / copies, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--format", nargs="+", default=["q4_1", "q4_k", "q8_0", "bf16"], choices=cpu_kernels.FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES)[:2])
    parser.add_argument("--peak", type=float, help="GOPS that all threads together can reach")
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()

    with cpu_kernels.forced(arguments.isa, arguments.threads):
        bandwidth = memory_bandwidth(arguments.threads or physical_cores())
        print(f"{cpu_kernels.isa()}, memory {bandwidth / 1e9:.1f} GB/s")
        for format in arguments.format:
            for name in arguments.shape:
                inputs, outputs = SHAPES[name]
                if inputs % cpu_kernels.tile_inputs(format):
                    continue
                for rows in arguments.rows:
                    seconds, nbytes = time_product(format, inputs, outputs, rows, arguments.seconds)
                    gops = 2 * rows * inputs * outputs / seconds / 1e9
                    floor = nbytes / bandwidth
                    if arguments.peak:
                        floor = max(floor, gops * seconds / arguments.peak)
                    print(
                        f"{format:5} {name:14} {rows:4} rows {seconds * 1e6:9.1f} us {nbytes / seconds / 1e9:6.1f} GB/s"
                        f" {gops:7.1f} GOPS {floor / seconds:5.0%} of the floor",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
