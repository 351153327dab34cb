"""bitsandbytes: NF4 and FP4 (QLoRA, arXiv:2305.14314) and LLM.int8 (arXiv:2208.07339) as transformers saves them.

    weight                        uint8 [o * i / 2, 1], two codes a byte, the higher bits first
    weight.absmax                 the largest number of each block of the flattened matrix: float32, or codes for it:
    weight.nested_absmax          their scales, a block of them each
    weight.nested_quant_map       float32 [256], what they stand for
    weight.quant_map              float32 [16], what the weights' codes stand for
    weight.quant_state.bitsandbytes__nf4   JSON: shape, blocksize, nested_blocksize, nested_offset

    weight int8 [o, i], SCB float32 [o]: the largest number of each row, for the code 127

Published at https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from jaxllm.quantization.stored import Codes, Coding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, check_fields, real, several, whole
from jaxllm.weights.packings.module import Packed, Parts, matrices, unpack, unsupported

TYPES = ("nf4", "fp4")
STATE = ".weight.quant_state.bitsandbytes__"
MAX_STATE = 1 << 16
FIELDS = {"load_in_4bit": FLAG, "load_in_8bit": FLAG}
STATE_FIELDS = {
    "shape": several(whole(1, 2**32), 2),
    "blocksize": whole(32, 4096),
    "nested_blocksize": whole(1, 2**20),
    "nested_offset": real(-1e9, 1e9),
}
FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


def find_bitsandbytes(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    check_fields(config, FIELDS, "quantization_config.")
    kind = config.get("bnb_4bit_quant_type", "nf4")
    if config.get("load_in_4bit") and kind not in TYPES:
        raise unsupported("bitsandbytes", "bnb_4bit_quant_type", kind, " or ".join(TYPES))
    found = {parts.name: _int8(parts) for parts in matrices(checkpoint, ".SCB")}
    for type_ in TYPES:
        found |= {parts.name: _four_bits(parts, type_) for parts in matrices(checkpoint, STATE + type_)}
    return found


def _int8(parts: Parts) -> Packed:
    outputs, inputs = parts.info(".weight", ("I8",), rank=2).shape
    parts.info(".SCB", ("F32",), (outputs,))
    parts.ignore(".weight_format")
    coding = Coding(8, (1, inputs), FLOAT32)

    def read() -> tuple[np.ndarray, Codes]:
        codes = parts.array(".weight").view(np.uint8) ^ np.uint8(128)
        return codes, Codes(coding, parts.array(".SCB")[:, None] / np.float32(127))

    return parts.packed("bitsandbytes int8", (outputs, inputs), coding, read)


def _four_bits(parts: Parts, type_: str) -> Packed:
    state = _state(parts, STATE + type_)
    (outputs, inputs), block = state["shape"], state["blocksize"]
    count = outputs * inputs
    data = parts.info(".weight", ("U8", "BF16", "F16", "F32"))  # whatever type carries the bytes
    nbytes = math.prod(data.shape) * {"U8": 1, "F32": 4}.get(data.dtype, 2)
    if nbytes != -(-count // 2):
        raise parts.error(f"has {nbytes:,} bytes, which are no {(outputs, inputs)} of four bits", ".weight")
    blocks = -(-count // block)
    group = math.gcd(block, inputs)  # blocks of the flattened matrix may go over the ends of rows
    nested = ".weight.nested_absmax" in parts
    parts.info(".weight.absmax", ("U8",) if nested else ("F32",), (blocks,))
    parts.info(".weight.quant_map", ("F32",), (16,))
    if nested:
        parts.info(".weight.nested_absmax", ("F32",), (-(-blocks // state["nested_blocksize"]),))
        parts.info(".weight.nested_quant_map", ("F32",), (256,))
    levels = tuple(map(float, parts.array(".weight.quant_map")))
    if not all(map(math.isfinite, levels)) or group % 2:
        problem = f"has {inputs} inputs" if group % 2 else "stands for numbers that are not finite"
        raise parts.error(f"{problem}; accepted is an even number of inputs, and finite levels")
    # Scales that were quantized themselves are right to 1 part in 100: float16 holds them well enough.
    coding = Coding(4, (1, group), FLOAT16 if nested else FLOAT32, levels=levels)

    def read() -> tuple[np.ndarray, Codes]:
        swapped = np.ascontiguousarray(parts.array(".weight")).view(np.uint8).reshape(-1)
        codes = unpack(swapped << 4 | swapped >> 4, 4)[:count].reshape(outputs, inputs)
        largest = parts.array(".weight.absmax")
        if nested:  # the blocks' largest numbers are quantized as well
            shares = parts.array(".weight.nested_absmax")[np.arange(len(largest)) // state["nested_blocksize"]]
            largest = parts.array(".weight.nested_quant_map")[largest] * shares + np.float32(state["nested_offset"])
        scale = largest[np.arange(0, count, group) // block].reshape(outputs, -1)
        return codes, Codes(coding, scale.astype(coding.scale))

    return parts.packed(f"bitsandbytes {type_}", (outputs, inputs), coding, read)


def _state(parts: Parts, suffix: str) -> dict[str, Any]:
    info = parts.info(suffix, ("U8",), rank=1)
    if info.shape[0] > MAX_STATE:
        raise parts.error(f"has {info.shape[0]:,} bytes; accepted are {MAX_STATE:,}", suffix)
    try:
        state = json.loads(parts.array(suffix).tobytes())
    except (ValueError, RecursionError) as error:
        raise parts.error(f"is not readable as JSON: {error}", suffix) from None
    missing = {"shape", "blocksize"} - set(state) if isinstance(state, dict) else {"an object"}
    if missing:
        raise parts.error(f"holds no {' and no '.join(sorted(missing))}", suffix)
    check_fields(state, STATE_FIELDS, f"{parts.prefix}{suffix}: ")
    return {"nested_blocksize": 256, "nested_offset": 0.0} | state
