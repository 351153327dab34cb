"""Steps of sequences that keep a state, in rows that are scattered about a buffer; what the rows hold afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata


class Chunk(NamedTuple):
    """`length` tokens of one sequence, of which `begin` ran before. The state after `kept` of them is to be kept, and
    `resumes` says that the state before them lies in another row than the sequence's own; 0 keeps nothing."""

    begin: int
    length: int
    kept: int = 0
    resumes: bool = False


class Step(NamedTuple):
    meta: StepMetadata
    rows: int
    """Of a buffer: a sequence's own each, one for padding, then two more a sequence: read from, and kept in."""

    @property
    def live(self) -> np.ndarray:
        return np.asarray(self.meta.live)


def state_step(chunks: Sequence[Chunk], *, tokens: int, seqs: int, decode_only: bool = False) -> Step:
    """The metadata of a step of `tokens` tokens, padding among them, and up to `seqs` sequences."""
    count, lengths = len(chunks), [chunk.length for chunk in chunks]
    order = np.random.default_rng(7).permutation(seqs)
    slots = np.full(seqs, seqs, np.int32)
    slots[:count] = order[:count]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    query_start = np.full(seqs + 1, starts[-1], np.int32)
    query_start[: count + 1] = starts
    seq_ids = np.full(tokens, seqs, np.int32)
    positions = np.zeros(tokens, np.int32)
    fields = {name: np.zeros(seqs, np.int32) for name in ("context_len", "read", "kept", "kept_tokens")}
    fields["read"][:], fields["kept"][:] = slots, seqs
    begins = np.ones(seqs, bool)
    for i, chunk in enumerate(chunks):
        tokens_of = slice(starts[i], starts[i + 1])
        seq_ids[tokens_of], positions[tokens_of] = i, chunk.begin + np.arange(chunk.length)
        fields["context_len"][i], begins[i] = chunk.begin + chunk.length, chunk.begin == 0
        if chunk.resumes:
            fields["read"][i] = seqs + 1 + i
        if chunk.kept:
            fields["kept"][i], fields["kept_tokens"][i] = 2 * seqs + 1 + i, chunk.begin + chunk.kept
    meta = StepMetadata(
        positions=jnp.asarray(positions),
        seq_ids=jnp.asarray(seq_ids),
        context_len=jnp.asarray(fields["context_len"]),
        query_start=jnp.asarray(query_start),
        page_table=jnp.zeros((seqs, 1), jnp.int32),
        num_decodes=jnp.int32(next((i for i, n in enumerate(lengths) if n > 1), count)),
        num_seqs=jnp.int32(count),
        rotary_lengths=jnp.zeros(tokens, jnp.int32),
        decode_only=decode_only,
        states=StateRows(*map(jnp.asarray, (fields["read"], begins, slots, fields["kept"], fields["kept_tokens"]))),
    )
    return Step(meta, 3 * seqs + 1)


def run_by_token(
    step: Step, buffer: np.ndarray, run: Callable[[np.ndarray, int], tuple[np.ndarray, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """What `run(state, token) -> (state, output)` gives for each live token, in float64, and the buffer afterwards.

    The row of padding is as it was.
    """
    meta, states = step.meta, step.meta.states
    assert states is not None
    before, after = buffer.astype(np.float64), buffer.astype(np.float64)
    outputs: list[Any] = []
    for i in range(int(meta.num_seqs)):
        state = np.zeros_like(before[0]) if states.begins[i] else before[int(states.read[i])]
        begin, end = int(meta.query_start[i]), int(meta.query_start[i + 1])
        for token in range(begin, end):
            state, output = run(state, token)
            outputs.append(output)
            if int(meta.positions[token]) + 1 == int(states.kept_tokens[i]):
                after[int(states.kept[i])] = state
        after[int(states.written[i])] = state
    return np.stack(outputs), after


def used_rows(step: Step) -> np.ndarray:
    """All rows but the one that padding writes."""
    assert step.meta.states is not None
    return np.arange(step.rows) != len(step.meta.context_len)


DECODES = (
    Chunk(5, 1),
    Chunk(0, 1),
    Chunk(31, 1, kept=1),
    Chunk(8, 1, resumes=True),
    Chunk(15, 1, kept=1, resumes=True),
)
STEPS: dict[str, tuple[Sequence[Chunk], dict[str, Any]]] = {
    "decodes": (DECODES, {"tokens": 8, "seqs": 8, "decode_only": True}),
    "one": ((Chunk(0, 1),), {"tokens": 1, "seqs": 1, "decode_only": True}),
    "prompt": ((Chunk(0, 96),), {"tokens": 96, "seqs": 4}),
    "short": ((Chunk(0, 2), Chunk(0, 3, kept=1), Chunk(4, 7, kept=4)), {"tokens": 16, "seqs": 8}),
    "windows": (
        (Chunk(0, 64, kept=64), Chunk(64, 64, kept=32), Chunk(3, 65, resumes=True)),
        {"tokens": 256, "seqs": 4},
    ),
    "mixed": (
        (*DECODES, Chunk(0, 50, kept=48), Chunk(40, 3), Chunk(16, 130, kept=112, resumes=True), Chunk(0, 2, kept=2)),
        {"tokens": 256, "seqs": 16},
    ),
    "few tokens": ((Chunk(9, 1), Chunk(0, 4)), {"tokens": 8, "seqs": 16}),
}
"""Chunks of a step, and its sizes."""
