"""Attention with linear biases: logits that fall with the distance between two tokens (arXiv:2108.12409)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

USUAL_STEEPNESS = 8.0
"""The paper's, and that of almost all models."""


def alibi_slopes(heads: int, steepness: float = USUAL_STEEPNESS) -> Float[np.ndarray, "H"]:
    """How much the logits of each head fall with every token of distance.

    Of a power of two of heads, head `h` (from 1 on) has `2 ** (-steepness * h / heads)`. Of others the first have
    those of the next lower power of two, and the others every second one of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    between = np.arange(1, 2 * (heads - power), 2)
    return 2.0 ** (-steepness * np.concatenate([np.arange(1, power + 1) / power, between / (2 * power)]))
