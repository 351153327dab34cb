"""One int32 and one float32 vector carry a step's whole input: what is in them, and where."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import jax
import numpy as np

SAMPLING_INTS = ("top_k", "seed", "prompt_len", "blocked_until", "adjust", "logprobs", "window")
SAMPLING_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


class Field(NamedTuple):
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
        self.fields: dict[str, Field] = {}
        offset = 0
        for name, shape in shapes.items():
            self.fields[name] = Field(offset, shape)
            offset = self.fields[name].end
        self.size = offset

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays as writable views of `vector`."""
        return {name: vector[f.offset : f.end].reshape(f.shape) for name, f in self.fields.items()}

    def unpack(self, vector: jax.Array) -> dict[str, jax.Array]:
        """The arrays inside a traced function; an empty shape becomes a scalar."""
        return {name: vector[f.offset : f.end].reshape(f.shape) for name, f in self.fields.items()}


class StepPacking(NamedTuple):
    """The two vectors of one kind of step."""

    ints: Packing
    floats: Packing


def _sampling(rows: int, sampled: bool) -> tuple[dict, dict]:
    if not sampled:
        return {}, {}
    ints = {name: (rows, 2) if name == "seed" else (rows,) for name in SAMPLING_INTS}
    return ints, {name: (rows,) for name in SAMPLING_FLOATS}


@cache
def decode_packing(rows: int, pages_per_seq: int, sampled: bool) -> StepPacking:
    """`rows` sequences of one token each. A token of -1 is read from the slot's history."""
    ints, floats = _sampling(rows, sampled)
    table = {"page_table": (rows, pages_per_seq)}
    base = {"num_decodes": (), "tokens": (rows,), "position": (rows,), "slot": (rows,), "rotary_len": (rows,)}
    return StepPacking(Packing(**base, **ints, **table), Packing(**floats))


@cache
def backbone_packing(tokens: int, max_num_seqs: int, pages_per_seq: int) -> Packing:
    """`tokens` tokens of up to `min(tokens, max_num_seqs)` sequences."""
    seqs = min(tokens, max_num_seqs)
    return Packing(
        num_decodes=(), num_seqs=(), tokens=(tokens,), positions=(tokens,), seq_ids=(tokens,),
        query_start=(seqs + 1,), context_len=(seqs,), slot=(seqs,), rotary_len=(seqs,),
        page_table=(seqs, pages_per_seq),
    )  # fmt: skip


@cache
def head_packing(rows: int, sampled: bool, mask_words: int = 0) -> StepPacking:
    """`rows` rows of the backbone's hidden states that sample a token, behind a mask where `mask_words` is given."""
    ints, floats = _sampling(rows, sampled)
    if mask_words:
        ints["mask"] = (rows, mask_words)
    return StepPacking(Packing(hidden_row=(rows,), position=(rows,), slot=(rows,), **ints), Packing(**floats))


@cache
def pool_packing(tokens: int) -> Packing:
    """For each of `tokens` rows of hidden states the sum that it belongs to."""
    return Packing(owner=(tokens,))


@cache
def logits_packing(rows: int, count: int) -> Packing:
    """`rows` rows of hidden states, and `count` tokens for each whose logits are asked for."""
    return Packing(hidden_row=(rows,), token_ids=(rows, count))


@cache
def score_packing(rows: int) -> Packing:
    """`rows` rows of hidden states, and the token whose log-probability each is asked for."""
    return Packing(hidden_row=(rows,), target=(rows,))
