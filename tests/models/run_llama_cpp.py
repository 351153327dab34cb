"""What llama.cpp makes of token ids: run by itself, with a Python that has xllamacpp.

`run_llama_cpp.py MODEL.gguf next` gives the logarithms of the next token's probabilities after each of them, `[T, V]`,
and `run_llama_cpp.py MODEL.gguf mean` an encoder's hidden states in their mean, `[E]`. Standard input has the ids as
JSON, and the last line of standard output the numbers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp

LENGTH = 128


def main(path: str, wanted: str) -> None:
    ids = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = 1
    params.n_ctx = params.n_batch = params.n_ubatch = LENGTH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup, params.verbosity = False, 0
    if wanted == "mean":
        params.embedding, params.embd_normalize = True, -1
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(params)
    prefixes = [ids[: end + 1] for end in range(len(ids))]
    found = mean(server, ids) if wanted == "mean" else [logarithms(server, prefix) for prefix in prefixes]
    print()
    print(json.dumps(found))


def logarithms(server: Any, ids: list[int]) -> list[float]:
    asked = {"prompt": ids, "n_predict": 1, "n_probs": 1_000_000, "temperature": 0, "cache_prompt": True}
    [entry] = answer(server.handle_completions(asked))["choices"][0]["logprobs"]["content"]
    values = {token["id"]: token["logprob"] for token in entry["top_logprobs"]}
    return [values[token] for token in range(len(values))]


def mean(server: Any, ids: list[int]) -> list[float]:
    asked = {"input": ids, "embd_normalize": -1, "encoding_format": "float"}
    return answer(server.handle_embeddings(asked))["data"][0]["embedding"]


def answer(given: Any) -> dict[str, Any]:
    found = given if isinstance(given, dict) else json.loads(given)
    if "error" in found:
        raise SystemExit(str(found["error"]))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
