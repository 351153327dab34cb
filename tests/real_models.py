"""The shapes in which the tests run the two real models: few, and shared, so that a run compiles each once."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "prefill_buckets": (64,),
    "kv_cache_memory": "56MiB",  # SmolLM2 at float32: 1,216 tokens
    "enforce_eager": True,
}
"""Fields of the engine; how tokens come out the same in buckets of any size is shown on tiny models."""
