"""The slice of `gpu.py` that has torch do the same shapes: copy, matmul, attention, decode steps and prompts.

Keys and values lie end to end and no page table is read, a decode step is one CUDA graph, and one layer's weights stand
for all of them, being larger than any cache: what a model written plainly in torch could reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_slice import STEP_SECONDS, Slice, model_config


def measure_torch(run: Slice) -> None:
    """Measure the cells that are not yet there, where torch is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return print("torch: not measured; it is not installed")
    if not torch.cuda.is_available() and not run.given.tiny:
        return print("torch: not measured; it sees no GPU")
    with torch.inference_mode():
        Torch(run, torch).measure()
    return None


class Torch:
    def __init__(self, run: Slice, torch: Any):
        c = model_config(run.given)
        self.run, self.torch, self.given = run, torch, run.given
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.size, self.layers, self.hidden = c["hidden_size"], c["num_hidden_layers"], c["intermediate_size"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim, self.vocabulary = c.get("head_dim", self.size // self.heads), c["vocab_size"]

    def measure(self) -> None:
        run = self.run
        n, size = (256, 2**20) if self.given.tiny else (8192, 2**30)
        if run.wants(what="torch copy"):
            x = self.torch.zeros(size, dtype=self.torch.uint8, device=self.device)
            run.report(what="torch copy", GBs=2 * size / self.seconds(lambda: x.add_(1)) / 1e9)
        if run.wants(what="torch matmul"):
            a, b = self.random(n, n), self.random(n, n)
            run.report(what="torch matmul", TFLOPs=2 * n**3 / self.seconds(lambda: a @ b) / 1e12)
        for context in self.given.attention_contexts:
            for rows in self.given.attention_rows:
                cell = {"what": "torch attention", "rows": rows, "context": context}
                if run.wants(**cell) and self.fits(run, cell, layers=1):
                    q, keys, values = self.random(rows, self.heads, 1, self.dim), *self.cache(rows, context)
                    seconds = self.seconds(lambda q=q, k=keys, v=values: self.attend(q, k, v, False))
                    run.report(**cell, us_a_layer=seconds * 1e6, GBs=2 * keys.nbytes / seconds / 1e9)
        self.qkv = self.random((self.heads + 2 * self.kv_heads) * self.dim, self.size)
        self.out, self.down = self.random(self.size, self.heads * self.dim), self.random(self.size, self.hidden)
        self.gate_up, self.head = self.random(2 * self.hidden, self.size), self.random(self.vocabulary, self.size)
        for rows in self.given.rows:
            for context in self.given.contexts:
                cell = {"what": "torch decode", "rows": rows, "context": context}
                if run.wants(**cell) and self.fits(run, cell, layers=1):
                    x, cache = self.random(rows, self.size), self.cache(rows, context)
                    seconds = self.seconds(self.graph(lambda x=x, cache=cache: self.model(x, cache).argmax(-1)))
                    run.report(**cell, ms=seconds * 1e3, toks=rows / seconds)
        for tokens in self.given.prefill:
            if run.wants(what="torch prefill", tokens=tokens):
                x = self.random(tokens, self.size)
                seconds = self.seconds(lambda x=x: self.model(x, None))
                run.report(what="torch prefill", tokens=tokens, ms=seconds * 1e3, toks=tokens / seconds)

    def model(self, x: Any, cache: Any) -> Any:
        """All layers, and of a decode step the logits; without a cache `x` is a prompt that attends to itself."""
        functional = self.torch.nn.functional
        for _ in range(self.layers):
            q, k, v = (functional.rms_norm(x, (self.size,)) @ self.qkv.T).split(
                [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1
            )
            if cache is not None:
                heads = self.attend(q.view(-1, self.heads, 1, self.dim), *cache, False)
            else:
                prompt = (part.view(1, len(x), -1, self.dim).transpose(1, 2) for part in (q, k, v))
                heads = self.attend(*prompt, True).transpose(1, 2)
            x = x + heads.reshape(len(x), -1) @ self.out.T
            gate, up = (functional.rms_norm(x, (self.size,)) @ self.gate_up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ self.down.T
        return x if cache is None else x @ self.head.T

    def attend(self, q: Any, keys: Any, values: Any, causal: bool) -> Any:
        attention = self.torch.nn.functional.scaled_dot_product_attention
        return attention(q, keys, values, is_causal=causal, enable_gqa=True)

    def cache(self, rows: int, context: int) -> tuple[Any, Any]:
        """One layer's keys and values."""
        make = self.torch.zeros
        shape = (rows, self.kv_heads, context, self.dim)
        return tuple(make(shape, dtype=self.torch.bfloat16, device=self.device) for _ in range(2))  # type: ignore[return-value]

    def fits(self, run: Slice, cell: dict[str, Any], layers: int) -> bool:
        """Whether the cell's keys and values are no more than half of the free memory; the report says where not."""
        wanted = 4 * layers * cell["rows"] * self.kv_heads * cell["context"] * self.dim
        free = self.torch.cuda.mem_get_info()[0] if self.device == "cuda" else 2**30
        if wanted > free // 2:
            run.report(**cell, note=f"not measured: {wanted / 2**30:.1f} GiB of keys and values")
        return wanted <= free // 2

    def random(self, *shape: int) -> Any:
        return self.torch.randn(shape, dtype=self.torch.bfloat16, device=self.device) * shape[-1] ** -0.5

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work` as a CUDA graph, where there is CUDA."""
        if self.device != "cuda":
            return work
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            for _ in range(3):
                work()
        self.torch.cuda.synchronize()
        recorded = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(recorded):
            work()
        return recorded.replay

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds a call, the median of three runs of queued ones."""
        wait = self.torch.cuda.synchronize if self.device == "cuda" else lambda: None
        work()
        wait()
        began = time.perf_counter()
        work()
        wait()
        count, times = max(3, min(20, int(STEP_SECONDS / (time.perf_counter() - began)))), []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(count):
                work()
            wait()
            times.append((time.perf_counter() - began) / count)
        return sorted(times)[1]
