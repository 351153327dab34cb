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

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        """Greedy, all streams in each batch."""
        self._make_room(len(prompts), max(map(len, prompts)) + new_tokens)
        rows = [(token, at, stream) for stream, ids in enumerate(prompts) for at, token in enumerate(ids)]
        ends = np.cumsum([len(ids) for ids in prompts]) - 1
        tokens = best(self._run(rows, ends.tolist()))
        for step in range(1, new_tokens):
            rows = [(token, len(prompts[stream]) + step - 1, stream) for stream, token in enumerate(tokens)]
            tokens = best(self._run(rows, list(range(len(rows)))))
        return [new_tokens] * len(prompts)

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
            params.flash_attn = has_vnni()  # without these instructions it fails on longer prompts
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
    return Engine(arguments.model).generate


def distributions(arguments: argparse.Namespace) -> workload.Distributions:
    return Engine(arguments.model).distributions


if __name__ == "__main__":
    workload.run("ik_llama.cpp", start, distributions)
