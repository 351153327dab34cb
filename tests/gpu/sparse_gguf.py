"""A Llama in the formats of llama.cpp's Q4_K_M, in a GGUF file without contents, which is enough to compile it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from jaxllm.cli.convert.packed import announce
from tests.reference.gguf_keys import llama
from tests.reference.tiny_gguf import add_key


def write(config: dict[str, Any], path: Path) -> None:
    """Every second layer has its values and what leads down in Q6_K, as half of them do in such a file."""
    size, hidden = config["hidden_size"], config["intermediate_size"]
    kv = size // config["num_attention_heads"] * config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in llama(config | {"rope_parameters": {"rope_theta": config["rope_theta"]}}).items():
        if value is not None:
            add_key(writer, f"llama.{key}", value)
    announce(writer, "token_embd.weight", (config["vocab_size"], size), "Q4_K")
    announce(writer, "output.weight", (config["vocab_size"], size), "Q6_K")
    announce(writer, "output_norm.weight", (size,), "F32")
    for layer in range(config["num_hidden_layers"]):
        more = "Q6_K" if layer % 2 == 0 else "Q4_K"
        for name, shape, kind in (
            ("attn_norm", (size,), "F32"), ("attn_q", (size, size), "Q4_K"), ("attn_k", (kv, size), "Q4_K"),
            ("attn_v", (kv, size), more), ("attn_output", (size, size), "Q4_K"), ("ffn_norm", (size,), "F32"),
            ("ffn_gate", (hidden, size), "Q4_K"), ("ffn_up", (hidden, size), "Q4_K"),
            ("ffn_down", (size, hidden), more),
        ):  # fmt: skip
            announce(writer, f"blk.{layer}.{name}.weight", shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (tensors,) = writer.tensors
    writer.close()
    with path.open("r+b") as file:
        file.truncate(_aligned(path.stat().st_size) + sum(_aligned(tensor.nbytes) for tensor in tensors.values()))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
