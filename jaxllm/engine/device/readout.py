"""What is read from a chunk's hidden states besides the next token: scores of its prompt, and what pools."""

from __future__ import annotations

import numpy as np

from jaxllm.engine.device.device import Device
from jaxllm.engine.device.handle import Pooled, PooledRow, SampledRow, Score, Vocabularies
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.packing import logits_packing, pool_packing, score_packing
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import Chunk
from jaxllm.requests.pooling import MAX_TOKEN_IDS


def scoring_key(request: Request, size: int) -> Key:
    """The step that scores a prompt's tokens: of given tokens, or of the whole vocabulary."""
    return Key("score_all" if request.params.prompt_logprobs == -1 else "score", size)


class Readout:
    """Packs the steps that follow a backbone and sample nothing."""

    def __init__(self, device: Device, sizes: StepSizes, vocab_size: int):
        self._device = device
        self._sizes = sizes
        self._vocab_size = vocab_size

    def score(self, chunk: Chunk, row: int) -> list[Score]:
        """Log-probabilities of the prompt tokens that follow a chunk's, whose hidden states begin at `row`."""
        request = chunk.request
        last = min(chunk.start + chunk.length, request.num_prompt - 1)
        size = self._device.most_rows
        packing = score_packing(size)
        scores = []
        for start in range(chunk.start, last, size):
            positions = range(start + 1, min(start + size, last) + 1)
            targets = request.token_ids[positions.start : positions.stop]
            ints = np.zeros(packing.size, np.int32)
            x = packing.views(ints)
            first = row + start - chunk.start
            x["hidden_row"][: len(targets)] = np.arange(first, first + len(targets))
            x["target"][: len(targets)] = targets
            scores.append(Score(request, positions, targets, self._device.run(scoring_key(request, size), ints)))
        return scores

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
