"""What every layer is told about a step's batch of ragged tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """Which rows of their buffers the layers that keep a state of each sequence read and write in one step.

    A state that is kept is the one after the first `kept_tokens` tokens of its sequence, some of which run in this
    step. Where nothing is to be kept, `kept_tokens` is 0 and `kept` the row that padding writes. All rows are read
    before any is written.
    """

    read: Int[Array, "S"]
    begins: Bool[Array, "S"]
    """The sequence begins in this step: its state is zero, whatever the row that is read holds."""
    written: Int[Array, "S"]
    kept: Int[Array, "S"]
    kept_tokens: Int[Array, "S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImageRows:
    """Rows of images that take the place of tokens' embeddings in one step.

    A row begins with the embedding, and goes on with what the first layers add to their outputs, if they do.
    """

    rows: Float[Array, "N n"]
    row_of: Int[Array, "T"]
    """The row of each token; -1 for one that has an embedding of its own."""

    def placed(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The embeddings with the rows in their places."""
        return jnp.where(self.row_of[:, None] >= 0, self.part(0, x), x)

    def part(self, index: int, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The embedding of each token's row, or what layer `index - 1` adds; zeros for tokens without a row."""
        own = self.rows[:, index * x.shape[1] : (index + 1) * x.shape[1]]
        found = own.at[jnp.maximum(self.row_of, 0)].get(mode="clip")
        return jnp.where(self.row_of[:, None] >= 0, found, 0).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetadata:
    """One step's batch: `T` tokens of up to `S` sequences laid end to end, then padding.

    Decode rows come first: sequences `0 … num_decodes-1` have exactly one query token each, so that token `i` is
    sequence `i`'s. Sequences from `num_decodes` to `num_seqs-1` are prefill chunks. In a decode-only step `T == S`
    and there are no prefill chunks.

    Worked example, page_size 4: sequence 0 decodes its 6th token, sequence 1 prefills tokens 4…6 of its prompt:

        positions    [5, 4, 5, 6, 0, 0, 0, 0]     T = 8, then three rows of padding
        context_len  [6, 7, 0, 0]                 S = 4; tokens after this step, the query tokens included
        query_start  [0, 1, 4, 4, 4]
        page_table   [[3, 9, 0], [5, 2, 0], ...]  token p of a sequence lives in page_table[s, p // 4], row p % 4
        num_decodes  [1]
        num_seqs     [2]

    Page 0 is unused: padding reads and writes it. Query token `t` of sequence `s` attends to positions
    `0 … positions[t]` (and, with a window `w`, only to the last `w` of them).
    """

    positions: Int[Array, "T"]
    seq_ids: Int[Array, "T"]
    """Sequence of each token; S for padding."""
    context_len: Int[Array, "S"]
    query_start: Int[Array, "S+1"]
    page_table: Int[Array, "S P"]
    num_decodes: Int[Array, ""]
    num_seqs: Int[Array, ""]
    rotary_lengths: Int[Array, "T"]
    """How long each token's rotary embedding takes its sequence to be; see `models.layers.rope.rope_angles`."""
    decode_only: bool = field(metadata={"static": True})
    """Static: T == S and every row is a decode (or padding)."""
    slots: Int[Array, "S"] | None = None
    """The slot of each sequence; the last one for padding. None where a model runs without an engine."""
    states: StateRows | None = None
    """None where no layer keeps a state of each sequence."""
    token_types: Int[Array, "T"] | None = None
    """Which of two texts each token is of, where an encoder reads them as one; None where all are of the first."""
    adapter_scales: Float[Array, "T N"] | None = None
    """How much each token's products take of each adapter that is on the devices; None in a step without adapters."""
    adapter_gains: Int[Array, "N"] | None = None
    """1 for each of these adapters that has gains (DoRA), which the model's own tables tell it."""
    images: ImageRows | None = None
    """None in a step without images."""
    rope_places: Int[Array, "3 T"] | None = None
    """Time, height and width by which models with sections rotate each token; None where all are its position."""
    visible_until: Int[Array, "T"] | None = None
    """The position of the last token that each one sees, in layers that look ahead; None where that is itself."""
    tentative: bool = field(default=False, metadata={"static": True})
    """Static: some of its tokens may be refused once they have run; see `states.py`."""

    @property
    def state_rows(self) -> StateRows:
        assert self.states is not None, "a model with states is run with their rows"
        return self.states

    @property
    def live(self) -> Bool[Array, "T"]:
        """The tokens that are not padding."""
        return self.seq_ids < self.page_table.shape[0]


def prefill_tiles(meta: StepMetadata, tokens: int, block_q: int) -> Int[Array, "tiles 4"]:
    """Cuts the prefill chunks into tiles of at most `block_q` tokens: rows (sequence, first token, tokens, position).

    The first token is an index into the batch, the position is that token's. Tiles left over have 0 tokens.

    Worked example, block_q 2, one decode row, then chunks of 3 and 2 tokens that follow 4 and 0 cached ones:

        query_start [0, 1, 4, 6], context_len [9, 7, 2]  ->  [1, 1, 2, 4], [1, 3, 1, 6], [2, 4, 2, 0]
    """
    num_seqs = meta.context_len.shape[0]
    seq = jnp.arange(num_seqs)
    query_len = meta.query_start[1:] - meta.query_start[:-1]
    is_prefill = (seq >= meta.num_decodes) & (seq < meta.num_seqs)
    ends = jnp.cumsum(jnp.where(is_prefill, -(-query_len // block_q), 0))

    num_tiles = tokens // block_q + min(num_seqs, tokens)
    tile = jnp.arange(num_tiles)
    owner = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_seqs - 1)
    begin = jnp.where(owner > 0, ends[owner - 1], 0)
    offset = (tile - begin) * block_q
    count = jnp.where(tile < ends[-1], jnp.clip(query_len[owner] - offset, 0, block_q), 0)
    position = meta.context_len[owner] - query_len[owner] + offset
    return jnp.stack([owner, meta.query_start[owner] + offset, count, position], axis=1).astype(jnp.int32)
