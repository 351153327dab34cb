"""One int32 vector carries a step's whole input: what is in it, and where."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxllm.requests.sampling import MAX_LOGPROBS


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

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays as writable views of `vector`."""
        return {name: vector[f.offset : f.end].reshape(f.shape) for name, f in self.fields.items()}

    def unpack(self, vector: Shaped[Array, "... n"]) -> dict[str, jax.Array]:
        """The arrays inside a traced function; an empty shape becomes a scalar. Of many vectors, many of each."""
        lead = vector.shape[:-1]
        return {name: vector[..., f.offset : f.end].reshape((*lead, *f.shape)) for name, f in self.fields.items()}


SETTING_INTS = Packing(
    rotary_len=(),
    top_k=(),
    seed=(2,),
    prompt_len=(),
    blocked_until=(),
    adjust=(),
    logprobs=(),
    window=(),
    asked_ids=(MAX_LOGPROBS,),
)
SETTING_FLOATS = Packing(temperature=(), top_p=(), min_p=(), presence=(), frequency=(), repetition=())
"""What a request's slot is told once, when it is admitted."""


RECALLED_AT_ONCE = 512
"""A longer text is remembered in parts."""


@cache
def admit_packing(pages_per_seq: int) -> Packing:
    """A request's slot: where it begins, its pages so far, and its settings (`SETTING_FLOATS` go by themselves)."""
    return Packing(slot=(), position=(), page_table=(pages_per_seq,), settings=(SETTING_INTS.size,))


@cache
def recall_packing() -> Packing:
    """A part of a text to remember: `count` of the tokens, each plus one and a 0 at the text's end, from `place` on."""
    return Packing(place=(), count=(), tokens=(RECALLED_AT_ONCE,))


def _state_fields(sequences: int, has_states: bool) -> dict[str, tuple[int, ...]]:
    """Where a model keeps a state of each sequence: the row that it is resumed from, the one that another state is kept
    in, and the number of tokens after which that is; 0 says the slot's own row, and none."""
    return dict.fromkeys(("state_read", "state_kept", "kept_tokens"), (sequences,)) if has_states else {}


@cache
def decode_packing(rows: int, has_states: bool = False) -> Packing:
    """`rows` sequences of one token each, and how many tokens each gets. A token of -1 is in the slot's history.

    `new_page` is the page that a sequence goes on in once it has filled those that its slot knows; 0 for none.
    """
    states = _state_fields(rows, has_states)
    return Packing(num_decodes=(), num_steps=(), tokens=(rows,), slot=(rows,), new_page=(rows,), **states)


@cache
def verify_packing(rows: int, has_states: bool = False, num_drafts: int = 0, mask_words: int = 0) -> Packing:
    """`rows` sequences of one token each, as `decode_packing`, and how many drafted tokens each may try behind it.

    `new_pages` are as `backbone_packing` has them: only the device knows which page a sequence's next token lies in,
    and after how many tokens a state is kept.

    Where `mask_words` is given the host makes the drafts of some sequences, `num_given` of up to `num_drafts`, and each
    place of each sequence has a mask: of the token after its last one, and after each draft.
    """
    states = dict.fromkeys(("state_read", "state_kept"), (rows,)) if has_states else {}
    given: dict[str, tuple[int, ...]] = {}
    if mask_words:
        given = {"num_given": (rows,), "drafts": (rows, num_drafts), "mask": (rows, num_drafts + 1, mask_words)}
    return Packing(
        num_decodes=(), tokens=(rows,), slot=(rows,), most_drafts=(rows,), new_pages=(rows, 3), **states, **given
    )


@cache
def backbone_packing(
    tokens: int,
    max_num_seqs: int,
    page_size: int,
    has_states: bool = False,
    taps: tuple[int, ...] = (),
    patches: int = 0,
) -> Packing:
    """`tokens` tokens of up to `min(tokens, max_num_seqs)` sequences.

    `new_pages` are (slot, place in its page table, page) of what sequences have gained since their last step; what is
    left over says so to the slot that belongs to nobody. `taps` is the shape of the places of activations, in a step
    that records any. `patches` is the room for patches, each of a layer and a row, in a step that has any.
    """
    seqs = min(tokens, max_num_seqs)
    further = {"taps": taps} if taps else {}
    further |= {"patch_layers": (patches,), "patch_rows": (patches,)} if patches else {}
    return Packing(
        num_decodes=(), num_seqs=(), tokens=(tokens,), query_start=(seqs + 1,), slot=(seqs,),
        new_pages=(seqs + tokens // page_size, 3), **_state_fields(seqs, has_states), **further,
    )  # fmt: skip


@cache
def encode_packing(tokens: int, max_num_seqs: int) -> Packing:
    """`tokens` tokens of up to `min(tokens, max_num_seqs)` whole texts.

    `second_text` is the place in each at which the second of two texts begins; 0 where there is one.
    """
    seqs = min(tokens, max_num_seqs)
    return Packing(num_seqs=(), tokens=(tokens,), query_start=(seqs + 1,), second_text=(seqs,))


@cache
def head_packing(rows: int, mask_words: int = 0) -> Packing:
    """`rows` rows of the backbone's hidden states that sample a token, behind a mask where `mask_words` is given.

    Each is the last row of its sequence, so that its position is known from the slot.
    """
    mask = {"mask": (rows, mask_words)} if mask_words else {}
    return Packing(hidden_row=(rows,), slot=(rows,), **mask)


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
