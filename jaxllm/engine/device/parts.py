"""A step in parts, so that each stage of a model has one to run while the others run theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.engine.device.handle import Handle
from jaxllm.engine.work import Batch, Chunk


def parts_of(batch: Batch, most: int) -> list[Batch]:
    """The step for `batch` as up to `most` steps of some of its chunks each, in their order.

    Where some requests decode and others begin, the decodes are a part of their own: the next step waits for the tokens
    of one part no longer than it must. A step whose masks are filled while it runs stays whole: what is sampled last
    reads the hidden states of all.
    """
    if most == 1 or batch.masked:
        return [batch]
    decodes, others = batch.chunks[: batch.num_decodes], batch.chunks[batch.num_decodes :]
    if others:
        parts = [*([decodes] if decodes else []), *evenly(others, max(1, most - bool(decodes)))]
    else:
        parts = evenly(decodes, most)
    return [replace(batch, chunks=part, num_decodes=sum(chunk.length == 1 for chunk in part)) for part in parts]


def evenly(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Chunks in up to `most` runs of about as many tokens.

    Worked example: chunks of 5, 1, 1 and 6 tokens in two runs are [5, 1] and [1, 6].
    """
    total, before = sum(chunk.length for chunk in chunks), 0
    runs: list[list[Chunk]] = [[] for _ in range(most)]
    for chunk in chunks:
        runs[(2 * before + chunk.length) * most // (2 * total)].append(chunk)
        before += chunk.length
    return [run for run in runs if run]


def joined(handles: Sequence[Handle]) -> Handle:
    """One handle of all parts of a step."""
    first, *others = handles
    for other in others:
        first.scores += other.scores
        first.pooled += other.pooled
        first.vocabularies += other.vocabularies
        first.recorded += other.recorded
        first.further.append(other)
    return first
