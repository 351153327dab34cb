"""ik_llama.cpp, the fork of llama.cpp with the fastest kernels for a CPU, by the low-level calls of its wheel."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import workload
from ik_llama_cpp import _ctypes_api as api


class Engine:
    """A model, and a context for the shape of the work that was done last."""

    def __init__(self, model: str):
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._context = None
        self._shape = (0, 0)
        self._cached: list[list[int]] = []

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        """Greedy, all streams in each batch."""
        self._make_room(len(prompts), max(map(len, prompts)) + new_tokens)
        self._decode(prompts, new_tokens - 1)
        return [new_tokens] * len(prompts)

    def generate_cached(self, prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        """Goes on from a prompt that it was given before; the wheel cannot take back what came after it."""
        if prompts == self._cached:
            self._decode([], new_tokens)
        else:
            self._make_room(len(prompts), max(map(len, prompts)) + 256)
            self._decode(prompts, new_tokens - 1)
            self._cached = prompts
        return [new_tokens] * len(prompts)

    def _decode(self, prompts: list[list[int]], steps: int) -> None:
        if prompts:
            rows = [(token, at, stream) for stream, ids in enumerate(prompts) for at, token in enumerate(ids)]
            ends = np.cumsum([len(ids) for ids in prompts]) - 1
            self._tokens, self._positions = best(self._run(rows, ends.tolist())), list(map(len, prompts))
        for _ in range(steps):
            rows = [(*row, stream) for stream, row in enumerate(zip(self._tokens, self._positions, strict=True))]
            self._tokens = best(self._run(rows, list(range(len(rows)))))
            self._positions = [at + 1 for at in self._positions]

    def distributions(self, ids: list[int], first: int) -> Iterator[np.ndarray]:
        """Of the prompt up to `first` and then of a token at a time, as an answer is generated."""
        self._make_room(1, len(ids))
        rows = [(token, at, 0) for at, token in enumerate(ids[:first])]
        for end in range(first, len(ids)):
            [logits] = self._run(rows, [len(rows) - 1])
            yield logits - np.logaddexp.reduce(logits)
            rows = [(ids[end], end, 0)]

    def _make_room(self, streams: int, length: int) -> None:
        if self._shape != (streams, length):
            if self._context is not None:
                api.llama_free(self._context)
            params = api.llama_context_default_params()
            params.n_ctx = params.n_batch = streams * length
            params.n_seq_max = streams
            params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
            # It fails on longer prompts without these instructions, and with several streams of heads of 128.
            params.flash_attn = has_vnni() and streams == 1
            self._context, self._shape = api.llama_init_from_model(self._model, params), (streams, length)
        api.llama_kv_cache_clear(self._context)

    def _run(self, rows: list[tuple[int, int, int]], asked: list[int]) -> list[np.ndarray]:
        """One batch of (token, position, stream); the logits after each of the rows that are asked for."""
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, stream) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, 0
            batch.seq_id[row][0] = stream
        for row in asked:
            batch.logits[row] = 1
        status = api.llama_decode(self._context, batch)
        api.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode gave {status}")
        shape = (self._vocabulary,)
        return [np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), shape) for row in asked]


def best(logits: list[np.ndarray]) -> list[int]:
    return [int(row.argmax()) for row in logits]


def has_vnni() -> bool:
    """Whether the processor has AVX-VNNI."""
    return "avx_vnni" in Path("/proc/cpuinfo").read_text()


def start(arguments: argparse.Namespace) -> workload.Generate:
    engine = Engine(arguments.model)
    return engine.generate_cached if arguments.cached else engine.generate


def distributions(arguments: argparse.Namespace) -> workload.Distributions:
    return Engine(arguments.model).distributions


if __name__ == "__main__":
    workload.run("ik_llama.cpp", start, distributions)
