"""The shapes in which the tests run the two real models: few, and shared, so that a run compiles each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from jaxllm.weights.source import resolve_model

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


def first_layers(model: str, count: int, directory: Path) -> str:
    """A GGUF file of the first `count` layers of a real model, with all else that its own has."""
    reader, path = GGUFReader(resolve_model(model)), directory / "first_layers.gguf"
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = count if name == f"{architecture}.block_count" else field.contents()
            parts = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], parts)
    for tensor in reader.tensors:
        layer = tensor.name.removeprefix("blk.").partition(".")[0]
        if not layer.isdigit() or int(layer) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
