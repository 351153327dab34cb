"""One slice of `gpu.py` in the process that measures it: its rows, kept as they come, and the device's own peaks."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA_8B = Path(__file__).parents[1] / "tests" / "reference" / "configs" / "Llama-3.1-8B.json"
TINY: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WORK = ("config", "rows", "contexts", "attention_rows", "attention_contexts", "prefill", "isq", "tiny")
"""Arguments that decide what is measured: rows of other ones are not kept."""
STEP_SECONDS = 0.5
TINY_STEP_SECONDS = 0.05
"""About how long one of three runs of a step is timed; with --tiny."""
QUANTIZED = ("int4", "q4_0", "q4k", "q4_k_m", "gptq128", "mxfp4", "fp8")
"""Slices of decode steps with other weights."""


def model_config(given: argparse.Namespace, default: Path = LLAMA_8B) -> dict[str, Any]:
    """The config.json that is measured: --config's, or `default`; with --tiny its smallest relative."""
    values = json.loads(((given.config / "config.json") if given.config else default).read_text())
    return values.get("config", values) | (TINY if given.tiny else {})


def model_folder(given: argparse.Namespace, purpose: str, default: Path = LLAMA_8B) -> Path:
    """A folder with that config.json, beside the results; `purpose` says who may write more into it."""
    folder: Path = given.out / "models" / purpose / default.stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(given, default)))
    return folder


class Slice:
    """What one slice has measured, in a file that another run of it goes on from."""

    def __init__(self, name: str, given: argparse.Namespace):
        self.name, self.given, self.began = name, given, time.perf_counter()
        self.bandwidth = self.flops = 0.0
        """Bytes and bfloat16 operations a second that this device was found to reach."""
        self.left = 0
        """Cells that time did not suffice for."""
        self.work = {key: getattr(given, key) for key in WORK} | {"config": given.config and str(given.config)}
        self.path = given.out / f"{name}.json"
        kept = json.loads(self.path.read_text()) if self.path.exists() and not given.again else {}
        same = kept.get("device") == given.device and kept.get("work") == self.work
        self.rows: list[dict[str, Any]] = kept["rows"] if same else []
        if kept and not same:
            print(f"{self.path} is of another device or other sizes: measured anew")

    def report(self, **row: Any) -> None:
        """Print a measurement, and write all so far."""
        self.rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        self.write(complete=False)

    def write(self, complete: bool) -> None:
        about = {"device": self.given.device, "slice": self.name, "date": datetime.date.today().isoformat()}
        about |= {"versions": versions(), "work": self.work, "complete": complete, "rows": self.rows}
        self.path.write_text(json.dumps(about, indent=1) + "\n")

    def wants(self, **cell: Any) -> bool:
        """Whether this cell is to be measured now: it was not yet, and there is time."""
        if any(all(row.get(key) == value for key, value in cell.items()) for row in self.rows):
            return False
        if time.perf_counter() - self.began > self.given.seconds:
            self.left += 1
            return False
        return True

    def profile(self, name: str, step: Callable[[Any], Any], state: Any, count: int = 1) -> tuple[str, Any]:
        """The folder that a trace of so many steps is in, and the state after them."""
        import jax

        folder = self.given.out / "profiles" / name
        with jax.profiler.trace(str(folder)):
            for _ in range(count):
                state = step(state)
            jax.block_until_ready(state)
        return str(folder), state

    def timed(self, step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
        """Seconds a step, the median of three runs of queued ones; `step` takes and gives the state."""
        import jax

        length = TINY_STEP_SECONDS if self.given.tiny else STEP_SECONDS
        state = jax.block_until_ready(step(state))
        began = time.perf_counter()
        state = jax.block_until_ready(step(state))
        count = max(3, min(20, int(length / (time.perf_counter() - began))))
        times = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(count):
                state = step(state)
            jax.block_until_ready(state)
            times.append((time.perf_counter() - began) / count)
        return sorted(times)[1], state

    def peaks(self) -> None:
        """Bytes a second that a large array is copied with, read and written, and the rate of a large product."""
        from jaxllm import compat

        compat.share_device_memory(0.9)
        import jax
        import jax.numpy as jnp

        self.rows = [row for row in self.rows if row["what"] not in ("copy", "matmul")]
        # Of four bytes each: XLA copies numbers of one byte at half of the rate that the memory has.
        x = jnp.zeros(2**18 if self.given.tiny else 2**29, jnp.uint32)
        size = x.nbytes
        seconds, _ = self.timed(jax.jit(lambda x: x + 1, donate_argnums=0), x)
        self.bandwidth = 2 * size / seconds
        self.report(what="copy", GBs=self.bandwidth / 1e9)
        n = 256 if self.given.tiny else 8192
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) * n**-0.5 for i in range(2))
        product = jax.jit(lambda b, a: a @ b)
        seconds, _ = self.timed(lambda b: product(b, a), b)
        self.flops = 2 * n**3 / seconds
        self.report(what="matmul", TFLOPs=self.flops / 1e12)


def versions() -> dict[str, str]:
    """Of what decides the figures, where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
