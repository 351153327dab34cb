"""What a slot is told of its request, as arrays: made when the request is added, sent when it takes the slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int


class Adjustments(NamedTuple):
    """One slot's rows that only some requests need: those whose logits are adjusted."""

    slot: Int[Array, "1"]
    bias_ids: Int[Array, "B"]
    bias_values: Float[Array, "B"]
    blocked_ids: Int[Array, "M"]
    allowed: Int[Array, "words"]
    bad_words: Int[Array, "W 16"]


class Settings(NamedTuple):
    """A request's own, made when it is added: a value that does not fit fails there, and fails it alone."""

    ints: np.ndarray
    floats: np.ndarray
    adjustments: Adjustments | None
    """Only where the sampler reads them; without the slot, which is known when the request takes it."""
