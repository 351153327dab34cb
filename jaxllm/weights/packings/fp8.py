"""FP8 checkpoints: e4m3 numbers with a scale a tensor, a row, or a block of rows and columns.

    NAME.weight            float8_e4m3fn [o, i], or a stack of them
    NAME.weight_scale_inv  a factor, in spite of its name: DeepSeek's, one a block; Mistral's, one a tensor
    NAME.weight_scale      the same elsewhere

Scales of inputs, which such files may have as well, are not used: products take inputs as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.quantization.stored import FP8, Codes, Coding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import NULL, check_fields, either, several, shown, whole
from jaxllm.weights.packings.module import FLOATS, Packed, Parts

SCALES = ("_scale_inv", "_scale")
ACTIVATIONS = (".input_scale", ".input_zero_point", ".activation_scale", ".output_scale")
"""Of inputs, measured beforehand: inputs are rounded by what each of their rows holds, or not at all."""
FIELDS = {"weight_block_size": either(several(whole(1, 2**20), 2), NULL)}
FLOAT32 = np.dtype(np.float32)


def find(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Packed]:
    """Every FP8 matrix of a checkpoint by its name."""
    check_fields(config, FIELDS, "quantization_config.")
    rows, columns = config.get("weight_block_size") or (128, 128)
    found = {}
    for name, info in checkpoint.tensors.items():
        if info.dtype == "F8_E4M3":
            prefix = name.removesuffix(".weight")
            found[name] = fp8_matrix(Parts(checkpoint, prefix, name), name.removeprefix(prefix), (rows, columns))
    return found


def fp8_matrix(parts: Parts, weight: str, block: tuple[int, int]) -> Packed:
    """The matrix, or the stack, called so; `block` is what shares a scale where it is neither a tensor nor a row."""
    shape = parts.info(weight, ("F8_E4M3",)).shape
    if len(shape) < 2:
        raise parts.error(f"is FP8 of shape {shape}; accepted is a matrix, or a stack of them", weight)
    scales = next((weight + suffix for suffix in SCALES if weight + suffix in parts), None)
    if scales is None:
        wanted = " or ".join(shown(parts.name + suffix) for suffix in SCALES)
        raise parts.error(f"is FP8, and {wanted} is missing")
    *stack, rows, columns = shape
    info = parts.info(scales, (*FLOATS, "F8_E8M0"))
    of_blocks = (-(-rows // block[0]), -(-columns // block[1]))
    ones = (1, 1)[: max(0, len(info.shape) - len(stack))]
    if info.shape == (*stack, *of_blocks):
        shares, scale_shape = block, of_blocks
    elif info.shape == (*stack, rows, 1) or info.shape == (*stack, rows):
        shares, scale_shape = (1, columns), (rows, 1)
    elif info.shape == (*stack, *ones):
        shares, scale_shape = (rows, columns), (1, 1)
    else:
        accepted = f"{(*stack, *of_blocks)}, {(*stack, rows, 1)} or {tuple(stack)}"
        raise parts.error(f"is of shape {info.shape}; accepted is {accepted}, for {shape}", scales)
    parts.ignore(*ACTIVATIONS, f"{weight}_activation_scale")
    coding = Coding(8, shares, FLOAT32, codes=FP8)

    def read() -> tuple[np.ndarray, Codes]:
        factors = parts.array(scales).astype(np.float32).reshape(*stack, *scale_shape)
        return parts.array(weight), Codes(coding, factors)

    return parts.packed("FP8", shape, coding, read)
