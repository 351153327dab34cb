"""What is read from a chunk's hidden states besides the next token: scores of its prompt, and what pools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxllm.engine.device.device import Device
from jaxllm.engine.device.handle import Pooled, PooledRow, SampledRow, Score, Vocabularies
from jaxllm.engine.device.keys import Key, Kind
from jaxllm.engine.device.packing import logits_packing, pool_packing, score_packing
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.request import Request
from jaxllm.engine.work import Chunk
from jaxllm.requests.pooling import MAX_TOKEN_IDS

SCORING: dict[int | None, Kind] = {-1: "score_all", 0: "score_given"}
"""The steps that score a prompt's tokens by `prompt_logprobs`: all of the vocabulary, nothing but the given ones."""


def scoring_key(request: Request, size: int) -> Key:
    """The step that scores a prompt's tokens."""
    return Key(SCORING.get(request.params.prompt_logprobs, "score"), size)


class Stretch(NamedTuple):
    """Tokens of a request that are to be scored; the hidden state before the first of them is in `row`."""

    request: Request
    positions: range
    row: int


class Readout:
    """Packs the steps that follow a backbone and sample nothing."""

    def __init__(self, device: Device, sizes: StepSizes, vocab_size: int):
        self._device = device
        self._sizes = sizes
        self._vocab_size = vocab_size

    def scores(self, chunks: list[tuple[Chunk, int]]) -> list[Score]:
        """Log-probabilities of the prompt tokens that follow those of chunks, each of which begins at a row of the
        hidden states; requests of one kind share the rows of a step.
        """
        size = self._device.most_rows
        by_key: dict[Key, list[Stretch]] = defaultdict(list)
        for chunk, row in chunks:
            request = chunk.request
            first = max(chunk.start + 1, request.scores_from)
            positions = range(first, min(chunk.start + chunk.length, request.num_prompt - 1) + 1)
            if positions:
                by_key[scoring_key(request, size)].append(Stretch(request, positions, row + first - 1 - chunk.start))
        return [
            score
            for key, stretches in by_key.items()
            for part in together(stretches, size)
            for score in self._score(key, part)
        ]

    def _score(self, key: Key, stretches: list[Stretch]) -> list[Score]:
        packing = score_packing(key.size)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        places, at = [], 0
        for request, positions, row in stretches:
            rows = slice(at, at + len(positions))
            x["hidden_row"][rows] = np.arange(row, row + len(positions))
            x["target"][rows] = request.token_ids[positions.start : positions.stop]
            places.append(at)
            at = rows.stop
        result = self._device.run(key, ints)
        return [Score(s.request, s.positions, at, result) for s, at in zip(stretches, places, strict=True)]

    def vocabularies(self, rows: list[SampledRow]) -> list[Vocabularies]:
        """Log-probabilities of the whole vocabulary for the rows whose requests want them."""
        wanted = [row for row in rows if row.request.params.wants_vocabulary]
        size = self._device.most_rows
        packing = score_packing(size)
        found = []
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            ints = np.zeros(packing.size, np.int32)
            packing.views(ints)["hidden_row"][: len(part)] = [row.row for row in part]
            found.append(Vocabularies(part, self._device.run(Key("score_all", size), ints)))
        return found

    def unembed(self, states: np.ndarray, normed: bool) -> np.ndarray:
        """The logits `[n, V]` of up to `most_rows` states `[n, E]`; waits for them."""
        size = self._device.most_rows
        padded = np.zeros((size, states.shape[1]), self._device.hidden_dtype)
        padded[: len(states)] = states
        return np.asarray(self._device.run(Key("unembed", size), padded, np.array([normed], np.int32)))[: len(states)]

    def pool(self, chunks: list[tuple[Chunk, int]]) -> list[Pooled]:
        """What the requests that pool want of these chunks, each of which begins at a row of the hidden states."""
        sums: list[tuple[PooledRow, slice]] = []
        logits: list[tuple[Request, int]] = []
        size = self._sizes.hidden_size
        for chunk, row in chunks:
            request, end = chunk.request, row + chunk.length
            kind = request.pooling.kind  # type: ignore[union-attr]
            if kind == "mean":
                sums.append((PooledRow(request, size, chunk.start == 0, chunk.num_sampled > 0), slice(row, end)))
            elif kind == "cls" and chunk.start == 0:
                sums.append((PooledRow(request, size, True, True), slice(row, row + 1)))
            elif kind == "last" and chunk.num_sampled:
                sums.append((PooledRow(request, size, True, True), slice(end - 1, end)))
            elif kind == "logits" and chunk.num_sampled:
                logits.append((request, end - 1))
        return [*self._sums(sums), *self._token_logits(logits)]

    def _sums(self, wanted: list[tuple[PooledRow, slice]]) -> list[Pooled]:
        if not wanted:
            return []
        packing = pool_packing(self._sizes.max_num_batched_tokens)
        owner = np.full(packing.size, self._sizes.max_num_seqs, np.int32)
        for index, (_, rows) in enumerate(wanted):
            owner[rows] = index
        return [Pooled([row for row, _ in wanted], self._device.run(Key("pool"), owner))]

    def _token_logits(self, wanted: list[tuple[Request, int]]) -> list[Pooled]:
        """Each request takes as many rows as its token ids fill."""
        if not wanted:
            return []
        size = self._device.most_rows
        pieces = [
            (PooledRow(request, len(ids[start:end]), start == 0, end >= len(ids)), row, ids[start:end])
            for request, row in wanted
            for ids in [request.pooling.token_ids or range(self._vocab_size)]  # type: ignore[union-attr]
            for start in range(0, len(ids), MAX_TOKEN_IDS)
            for end in [start + MAX_TOKEN_IDS]
        ]
        found = []
        for start in range(0, len(pieces), size):
            part = pieces[start : start + size]
            packing = logits_packing(size, MAX_TOKEN_IDS)
            ints = np.zeros(packing.size, np.int32)
            x = packing.views(ints)
            for index, (_, row, ids) in enumerate(part):
                x["hidden_row"][index] = row
                x["token_ids"][index, : len(ids)] = ids
            found.append(Pooled([row for row, _, _ in part], self._device.run(Key("token_logits", size), ints)))
        return found


def together(stretches: list[Stretch], size: int) -> Iterator[list[Stretch]]:
    """The same, cut where need be, in lists of up to `size` tokens.

    Worked example, size 4: stretches of 3 and 6 tokens are given as [3, 1], [4] and [1].
    """
    part, room = [], size
    for request, positions, row in stretches:
        while positions:
            now, positions = positions[:room], positions[room:]
            part.append(Stretch(request, now, row))
            row, room = row + len(now), room - len(now)
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part
