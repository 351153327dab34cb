"""Quantized checkpoints of a Llama's shape in files without contents, which is enough to compile what they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NBYTES = {"I32": 4, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1}
GROUP = 128

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""By what their names add to a module's: type and shape."""


def _gptq(outputs: int, inputs: int) -> Tensors:
    groups = inputs // GROUP
    return {
        ".qweight": ("I32", (inputs // 8, outputs)),
        ".qzeros": ("I32", (groups, outputs // 8)),
        ".scales": ("F16", (groups, outputs)),
        ".g_idx": ("I32", (inputs,)),
    }


def _fp8_blocks(outputs: int, inputs: int) -> Tensors:
    return {
        ".weight": ("F8_E4M3", (outputs, inputs)),
        ".weight_scale_inv": ("F32", (-(-outputs // GROUP), -(-inputs // GROUP))),
    }


def _int8(outputs: int, inputs: int) -> Tensors:
    return {".weight": ("I8", (outputs, inputs)), ".weight_scale": ("BF16", (outputs, 1))}


_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        }
    },
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
PACKINGS: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "gptq": (_GPTQ | {"desc_act": False}, _gptq),
    "gptq_sorted": (_GPTQ | {"desc_act": True}, _gptq),
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, _fp8_blocks),
    "w8a8": (_W8A8, _int8),
}


def write(config: dict[str, Any], packing: str, folder: Path) -> None:
    """config.json, and tensors of which only the orders of inputs are written: a disk holds no more than those."""
    quantization, tensors_of = PACKINGS[packing]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    header, written, end = {}, {}, 0
    for name, (dtype, shape) in _tensors(config, tensors_of):
        size = NBYTES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        if name.endswith(".g_idx"):
            inputs = np.arange(shape[0], dtype="<i4")
            if quantization["desc_act"]:
                np.random.default_rng(shape[0]).shuffle(inputs)
            written[end] = inputs // GROUP
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        for offset, array in written.items():
            file.seek(begin + offset)
            file.write(array.tobytes())
        file.truncate(begin + end)


def _tensors(
    config: dict[str, Any], tensors_of: Callable[[int, int], Tensors]
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    size, hidden, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or size // config["num_attention_heads"]
    heads, kv_heads = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    matrices = {
        "self_attn.q_proj": (heads, size), "self_attn.k_proj": (kv_heads, size), "self_attn.v_proj": (kv_heads, size),
        "self_attn.o_proj": (size, heads), "mlp.gate_proj": (hidden, size), "mlp.up_proj": (hidden, size),
        "mlp.down_proj": (size, hidden),
    }  # fmt: skip
    yield "model.embed_tokens.weight", ("BF16", (vocabulary, size))
    yield "lm_head.weight", ("BF16", (vocabulary, size))
    yield "model.norm.weight", ("BF16", (size,))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", ("BF16", (size,))
        for name, shape in matrices.items():
            for suffix, tensor in tensors_of(*shape).items():
                yield f"{prefix}.{name}{suffix}", tensor
