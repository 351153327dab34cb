"""Packs the texts of a step for an encoder, enqueues it, and hands back a handle at once."""

from __future__ import annotations

import numpy as np

from jaxllm.engine.device.drafts.guesses import FillMasks
from jaxllm.engine.device.handle import Handle
from jaxllm.engine.device.packing import encode_packing
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.request import Request
from jaxllm.engine.work import Batch, Chunk


class EncoderRunner(Runner):
    """An encoder's texts have no slots: a step is sent all that it needs."""

    def prepare(self, request: Request) -> None:
        """Nothing is kept of a request, so nothing is laid out."""

    def dispatch(self, batch: Batch, fill: FillMasks | None = None) -> Handle:
        """Enqueue the step for `batch` without waiting for anything. Nothing is sampled, so there are no masks."""
        self._begin()
        key = self._device.covering("encode", batch.num_tokens)
        packing = encode_packing(key.size, self._sizes.max_num_seqs)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_seqs"][...] = len(batch.chunks)
        row = 0
        pooling: list[tuple[Chunk, int]] = []
        for index, chunk in enumerate(batch.chunks):
            pooling.append((chunk, row))
            x["tokens"][row : row + chunk.length] = chunk.request.token_ids
            x["second_text"][index] = chunk.request.second_text
            row += chunk.length
            x["query_start"][index + 1 :] = row
        self._count(key, batch.num_tokens, chunks=batch.chunks)
        self._device.run(key, ints)
        return self._end(Handle(pooled=self._readout.pool(pooling)), batch)
