"""One int32 vector carries a step's whole input: what is in it, and where."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxllm.requests.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from jaxllm.engine.core.keys import Key
    from jaxllm.engine.core.sizes import StepSizes


class PackedField(NamedTuple):
    """One array's place in a vector."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


class Packing:
    """Arrays laid end to end in one vector.

    Worked example: `Packing(tokens=(4,), page_table=(2, 3))` is a vector of 10: four tokens, then the table row by row.
    """

    def __init__(self, **shapes: tuple[int, ...]):
        self.fields: dict[str, PackedField] = {}
        offset = 0
        for name, shape in shapes.items():
            self.fields[name] = PackedField(offset, shape)
            offset = self.fields[name].end
        self.size = offset

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A vector of zeros, and its views."""
        vector = np.zeros(self.size, np.int32)
        return vector, self.views(vector)

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays as writable views of `vector`."""
        return {name: vector[f.offset : f.end].reshape(f.shape) for name, f in self.fields.items()}

    def unpack(self, vector: Shaped[Array, "... n"]) -> dict[str, jax.Array]:
        """The arrays inside a traced function; an empty shape becomes a scalar. Many vectors give many of each."""
        lead = vector.shape[:-1]
        return {name: vector[..., f.offset : f.end].reshape((*lead, *f.shape)) for name, f in self.fields.items()}


SETTING_INTS = Packing(
    rotary_len=(), top_k=(), seed=(2,), prompt_len=(), logprobs=(), asked_ids=(MAX_LOGPROBS,), uses=()
)
SETTING_FLOATS = Packing(temperature=(), top_p=(), min_p=())
"""The settings that a request's slot is told once, when it is admitted; `uses` has a bit for each feature that it uses.
"""


@cache
def admit_packing(pages_per_seq: int) -> Packing:
    """A request's slot: where it begins, its pages so far, and its settings (`SETTING_FLOATS` go by themselves)."""
    return Packing(slot=(), position=(), page_table=(pages_per_seq,), settings=(SETTING_INTS.size,))


def core_fields(key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
    """The fields that every step of a kind is sent; its features' fields follow.

    decode: `size` sequences of one token each, and how many tokens each gets. A token of -1 is in the slot's history.
    `new_page` is the page that a sequence goes on in once it has filled those that its slot knows; 0 for none.

    verify: the same, and how many tokens each sequence may try ahead. Its `new_pages` are as a backbone has them: only
    the device knows which page a sequence's next token lies in.

    backbone: `size` tokens of up to `min(size, max_num_seqs)` sequences. `new_pages` are (slot, place in its page
    table, page) of what sequences have gained since their last step; the rest names the slot of padding.

    head: `size` rows of the backbone's hidden states that sample a token. Each is the last row of its sequence, so that
    its position is known from the slot.

    encode: `size` tokens of up to `min(size, max_num_seqs)` whole texts.
    """
    size, seqs = key.size, min(key.size, sizes.max_num_seqs)
    ragged: dict[str, tuple[int, ...]] = {"tokens": (size,), "query_start": (seqs + 1,), "num_seqs": ()}
    decode: dict[str, tuple[int, ...]] = {"tokens": (size,), "slot": (size,), "num_decodes": ()}
    match key.kind:
        case "decode":
            return decode | {"num_steps": (), "new_page": (size,)}
        case "verify":
            return decode | {"most_ahead": (size,), "new_pages": (size, 3)}
        case "backbone":
            pages = seqs + size // sizes.page_size
            return ragged | {"num_decodes": (), "slot": (seqs,), "new_pages": (pages, 3)}
        case "head":
            return {"hidden_row": (size,), "slot": (size,)}
        case "encode":
            return ragged
    raise ValueError(f"a step of kind {key.kind} has no batch")
