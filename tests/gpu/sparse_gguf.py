"""A Llama in the formats of llama.cpp's Q4_K_M, in a GGUF file without contents, which is enough to compile it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write(config: dict[str, Any], path: Path) -> None:
    """Every second layer has its values and what leads down in Q6_K, as half of them do in such a file."""
    size, hidden, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = size // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    nbytes = _announce(writer, "token_embd.weight", (config["vocab_size"], size), "Q4_K")
    nbytes += _announce(writer, "output.weight", (config["vocab_size"], size), "Q6_K")
    nbytes += _announce(writer, "output_norm.weight", (size,), "F32")
    for layer in range(layers):
        more = "Q6_K" if layer % 2 == 0 else "Q4_K"
        for name, shape, kind in (
            ("attn_norm", (size,), "F32"), ("attn_q", (size, size), "Q4_K"), ("attn_k", (kv, size), "Q4_K"),
            ("attn_v", (kv, size), more), ("attn_output", (size, size), "Q4_K"), ("ffn_norm", (size,), "F32"),
            ("ffn_gate", (hidden, size), "Q4_K"), ("ffn_up", (hidden, size), "Q4_K"),
            ("ffn_down", (size, hidden), more),
        ):  # fmt: skip
            nbytes += _announce(writer, f"blk.{layer}.{name}.weight", shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        begin = -(-path.stat().st_size // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
        file.truncate(begin + nbytes)


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """The bytes of a tensor, after which the next one may begin."""
    kind = gguf.GGMLQuantizationType[dtype]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // elements * nbytes
    stored = (*shape[:-1], shape[-1] // elements * nbytes)
    if dtype == "F32":
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
    else:
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    return -(-size // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
