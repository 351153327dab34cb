"""How near a GPU's steps come to what its memory and its tensor cores allow. Dummy weights made there; no files.

    python benchmarks/gpu.py                              # Llama-3.1-8B: every part
    python benchmarks/gpu.py --parts copy attention       # one slice of it
    python benchmarks/gpu.py --config DIR --tiny          # another model's config.json; sizes for a CPU

Prints a line a measurement, with its share of the floor: weights and live keys and values read once at the copy
bandwidth measured here, or the matmul rate. Writes all of them to --out with the device's name. --autotune keeps what
XLA tuned, for compiling elsewhere (`--xla_gpu_load_autotune_results_from`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA_8B = Path(__file__).parents[1] / "tests" / "reference" / "configs" / "Llama-3.1-8B.json"
PARTS = ("copy", "matmul", "attention", "decode", "prefill", "mixed", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a folder with a config.json; Llama-3.1-8B's if not given")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--isq", help="quantize the weights")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument("--seconds", type=float, default=540, help="stop starting measurements after so many")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--autotune", type=Path, help="write XLA's autotune results here")
    given = parser.parse_args()
    if given.tiny:
        given.rows, given.contexts, given.prefill = [1, 4], [32], [16]
    if given.autotune:
        flag = f"--xla_gpu_dump_autotune_results_to={given.autotune}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    Bench(given).run()


class Bench:
    """One run: the device, what it was found to reach, and everything that was measured."""

    def __init__(self, given: argparse.Namespace):
        from jaxllm import compat

        compat.share_device_memory(0.9)
        import jax

        self.given, self.began = given, time.perf_counter()
        self.device = jax.devices()[0].device_kind
        self.results: list[dict[str, Any]] = []
        self.bandwidth = self.flops = 0.0

    def run(self) -> None:
        self.copy()
        self.matmul()
        if {"attention", "decode", "prefill", "mixed"} & set(self.given.parts):
            from benchmarks.gpu_model import Model

            model = Model(self.given, LLAMA_8B)
            self.report(what="plan", summary=model.blueprint.plan.summary())
            for part in ("attention", "decode", "prefill", "mixed"):
                if part in self.given.parts:
                    getattr(model, part)(self)
        if "torch" in self.given.parts:
            self.torch()

    def report(self, **row: Any) -> None:
        """Print a measurement, and write all so far."""
        self.results.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        self.given.out.write_text(json.dumps({"device": self.device, "results": self.results}, indent=1))

    @property
    def time_left(self) -> bool:
        return time.perf_counter() - self.began < self.given.seconds

    def copy(self) -> None:
        """Bytes a second that a large array is read and written with, together."""
        import jax
        import jax.numpy as jnp

        x = jnp.zeros(2**20 if self.given.tiny else 2**30, jnp.uint8)
        size = x.nbytes
        seconds, _ = timed(jax.jit(lambda x: x + 1, donate_argnums=0), x)
        self.bandwidth = 2 * size / seconds
        self.report(what="copy", GBs=self.bandwidth / 1e9)

    def matmul(self) -> None:
        """The rate of a large product of bfloat16."""
        import jax
        import jax.numpy as jnp

        n = 256 if self.given.tiny else 8192
        x = jnp.ones((n, n), jnp.bfloat16) / n
        seconds, _ = timed(jax.jit(lambda x: x @ x), x)
        self.flops = 2 * n**3 / seconds
        self.report(what="matmul", TFLOPs=self.flops / 1e12)

    def torch(self) -> None:
        """The same product and copy in torch, where that is installed with a GPU."""
        try:
            import torch
        except ImportError:
            return self.report(what="torch", note="not installed")
        if not torch.cuda.is_available():
            return self.report(what="torch", note="sees no GPU")
        n = 8192
        x = torch.ones((n, n), dtype=torch.bfloat16, device="cuda") / n
        y = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
        for what, work in (("matmul", lambda: x @ x), ("copy", lambda: y.add_(1))):
            work()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                work()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / 20
            rate = {"TFLOPs": 2 * n**3 / seconds / 1e12} if what == "matmul" else {"GBs": 2 * 2**30 / seconds / 1e9}
            self.report(what=f"torch {what}", **rate)
        return None


def timed(step: Callable[[Any], Any], state: Any, count: int = 20) -> tuple[float, Any]:
    """Seconds a step, the median of three runs of `count` queued ones; `step` takes and gives the state."""
    import jax

    state = jax.block_until_ready(step(state))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / count)
    return sorted(times)[1], state


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
