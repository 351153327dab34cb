"""A tiny random model behind a real vocabulary: what a grammar or a marker does there, it does in earnest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm import LLM
from tests.reference import load_golden
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config
from tests.weights.models import real_model


def llm_with_real_vocabulary(directory: Path, eos_token_id: int, **settings: Any) -> LLM:
    """Random weights, as sure of what comes next as a real model is, with SmolLM2's tokenizer.

    One layer, as it is the vocabulary that matters. Few pages, so that requests are preempted; small chunks, so that
    prompts are cut.
    """
    config = tiny_config("llama_gqa") | {
        "vocab_size": 49152, "max_position_embeddings": 512, "num_hidden_layers": 1,
    }  # fmt: skip
    others = ("model.layers.1.", "model.layers.2.")
    shapes = {n: shape for n, shape in load_golden("llama_gqa").tensor_shapes.items() if not n.startswith(others)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (config["vocab_size"], config["hidden_size"])
    weights = draw_weights("llama_gqa", shapes)
    weights["lm_head.weight"] *= 6
    return LLM(
        save_checkpoint(config | {"eos_token_id": eos_token_id}, weights, directory),
        tokenizer=str(real_model("smollm2-135m")), dtype="float32", max_model_len=192, max_num_seqs=4,
        max_num_batched_tokens=32, kv_cache_memory="64KiB", enforce_eager=True, decode_buckets=(), prefill_buckets=(),
        **settings,
    )  # fmt: skip
