"""llama.cpp's server in this process, by the wheel xllamacpp. The model is a GGUF file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import workload
import xllamacpp


class Engine:
    """A server that has a slot for each stream."""

    def __init__(self, model: str, streams: int, length: int, cached: bool = False):
        self._cached, params = cached, xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel, params.n_ctx, params.kv_unified = streams, streams * length, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Sequence[int]:
        found = self._ask(prompt=prompts, n_predict=new_tokens, cache_prompt=self._cached)
        # "usage" is that of the first prompt alone; who ends by length has as many tokens as were asked for.
        return [new_tokens if choice["finish_reason"] == "length" else 0 for choice in found["choices"]]

    def distributions(self, ids: list[int], first: int) -> Iterator[list[float]]:
        """Each prefix by a request of its own, which finds the one before it cached."""
        vocabulary = None
        for end in range(first, len(ids)):
            found = self._ask(prompt=ids[:end], n_predict=1, n_probs=vocabulary or 1_000_000, cache_prompt=True)
            [entry] = found["choices"][0]["logprobs"]["content"]
            values = {token["id"]: token["logprob"] for token in entry["top_logprobs"]}
            vocabulary = len(values)
            yield [values[token] for token in range(vocabulary)]

    def _ask(self, **fields: Any) -> dict[str, Any]:
        found = self._server.handle_completions({"temperature": 0, "ignore_eos": True, **fields})
        found = found if isinstance(found, dict) else json.loads(found)
        if "error" in found:
            raise SystemExit(str(found["error"]))
        return found


def start(arguments: argparse.Namespace) -> workload.Generate:
    return Engine(arguments.model, arguments.max_num_seqs, arguments.max_model_len, arguments.cached).generate


def distributions(arguments: argparse.Namespace) -> workload.Distributions:
    return Engine(arguments.model, 1, arguments.max_model_len).distributions


if __name__ == "__main__":
    workload.run("xllamacpp", start, distributions)
